"""A process that the launcher has started, with all that it starts itself.

It leads a process group, so that what it starts ends with it. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.processes.job import Job
from pipeline.processes.logs import Log

SHUT = 1.0  # seconds to read what an ended process has left in its pipes


@dataclass
class Child:
    """One of the processes.

    Attributes:
      process: its handle; its id is the group's too.
      readers: threads that copy its lines.
    """

    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    @property
    def code(self) -> int:
        """Its exit code, as a shell gives it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def how(self) -> str:
        """How it failed, for a message."""
        code = self.process.returncode
        if code < 0:
            return f"(pid {self.process.pid}) was ended by {signal.Signals(-code).name}"
        return f"(pid {self.process.pid}) failed with exit code {code}"

    def copy(self, index: int, log: Log) -> None:
        """Begin to copy its lines."""
        streams = ((self.process.stdout, False), (self.process.stderr, True))
        for stream, is_error in streams:
            reader = threading.Thread(target=log.copy, args=(index, stream, is_error), daemon=True)
            reader.start()
            self.readers.append(reader)

    def report(self, index: int, ends: queue.SimpleQueue[int]) -> None:
        """Tell when it ends; in the order of ends, exactly."""

        def wait() -> None:
            self.process.wait()
            ends.put(index)

        threading.Thread(target=wait, daemon=True).start()

    def signal_group(self, number: int) -> None:
        """Send a signal to it and to all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """End what it has left behind, and read its last lines."""
        self.signal_group(signal.SIGKILL)
        for reader in self.readers:
            reader.join(SHUT)


def start(job: Job, index: int, port: int) -> Child:
    """Start a process of a job.

    Args:
      job: which.
      index: the process's number.
      port: the coordinator's.
    """
    process = subprocess.Popen(  # noqa: S603  (what the user wants to run)
        list(job.command),
        env=job.environment(index, port, os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    return Child(process)


def stop(children: Sequence[Child], number: int, grace: float) -> None:
    """Ask those that run to end, and kill them after a while."""
    running = [child for child in children if child.running]
    for child in running:
        child.signal_group(number)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(child.running for child in running):
        time.sleep(0.05)
    kill(running)
    for child in running:
        child.finish()


def kill(children: Sequence[Child]) -> None:
    """End them at once."""
    for child in children:
        if child.running:
            child.signal_group(signal.SIGKILL)
            child.process.wait()
