"""What the launcher starts: a command, and the environment that tells a process its place."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.processes.cluster import COORDINATOR, PROCESS, PROCESSES

DEVICES = "--xla_force_host_platform_device_count"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
      command: the program and its arguments.
      processes: how many.
      devices: virtual CPU devices of each.
      port: of the coordinator, 0 for a free one.
      grace: seconds from asking a process to end until it is killed.
    """

    command: Sequence[str]
    processes: int
    devices: int = 1
    port: int = 0
    grace: float = 5.0

    def environment(self, process: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """What a process finds in its environment.

        Args:
          process: its number.
          port: the coordinator's.
          base: the launcher's own.
        """
        flags = f"{base.get('XLA_FLAGS', '')} {DEVICES}={self.devices}"  # the last one counts
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONUNBUFFERED": "1",  # a killed process takes no lines with it
            **base,
            "XLA_FLAGS": flags.strip(),
            COORDINATOR: f"{HOST}:{port}",
            PROCESSES: str(self.processes),
            PROCESS: str(process),
        }


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
