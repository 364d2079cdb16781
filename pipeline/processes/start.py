"""The start of a program that may be one of several processes, and its end."""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

import jax

from pipeline.base.arguments import is_number
from pipeline.processes import service
from pipeline.processes.agreement import agree, fields_of
from pipeline.processes.alive import Signs
from pipeline.processes.cluster import Cluster, find
from pipeline.processes.names import text_of_processes, write_at_once

BETWEEN_CPUS = "jax_cpu_collectives_implementation"
LOOPBACK = ("localhost", "127.", "::1")
FOREVER = 10**8  # seconds; jax takes an integer
LOOK = 0.1  # seconds between two checks whether the others have ended


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    config: Any = None,
    timeout: float = 300.0,
    grace: float = 5.0,
    heartbeat: float = 40.0,
) -> Cluster:
    """Make this process one of a job; with one process, do nothing.

    Call it before the first use of a device. Arguments that are None come from ``python -m pipeline
    launch``, or from SLURM, Open MPI, a Kubernetes job or a TPU pod. The function starts
    `jax.distributed`, with gloo for collectives between CPUs, waits for all processes, and compares
    their code, versions and options. From then on, jax ends this process if another process dies or
    hangs. A process whose program is done waits until all programs are done.

    Args:
      coordinator: ``host:port`` of process 0, with a port that is free on its host.
      num_processes: the number of processes in the job.
      process_id: the number of this process, 0 <= process_id < num_processes.
      config: options that must be equal on all processes: a mapping, a dataclass or a namespace.
      timeout: seconds to wait for the other processes, at the start and at the end.
      grace: seconds that a failed process waits for the others to end.
      heartbeat: seconds without a sign of life until a process counts as dead; `math.inf` for ever.

    Returns:
      The place of this process: ``.index`` of ``.count``.

    Raises:
      OSError: process 0 cannot listen at the coordinator's address.
      RuntimeError: jax.distributed is initialised already.
      TimeoutError: a process has connected, but does not call this function.
      ValueError: a part of the address, or a time, is missing or wrong; or processes do not run the
        same program. The message then has the fields, their values, and the processes.
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "initialize() was called in a process where jax.distributed is initialised already; "
            "call it once, and instead of jax.distributed.initialize()"
        )
    _check_seconds(timeout=timeout, grace=grace, heartbeat=heartbeat)
    here = find(coordinator, num_processes, process_id, timeout=timeout)
    if here.count == 1:
        return here
    if getattr(jax.config, BETWEEN_CPUS) in (None, "none"):
        jax.config.update(BETWEEN_CPUS, "gloo")
    fields = fields_of(config) | {"num_processes": str(here.count)}
    _connect(here, timeout, heartbeat)
    if heartbeat < math.inf:
        signs = Signs(here, heartbeat)
        signs.start()
        atexit.register(signs.stop)  # runs after `_leave`: the last registered function runs first
    atexit.register(_leave, here, os.getpid(), timeout, grace)
    agree(fields, here.index, here.count, timeout)
    return here


def _connect(here: Cluster, timeout: float, heartbeat: float) -> None:
    """Start jax.distributed, which waits for all processes."""
    local = here.address[0].startswith(LOOPBACK)
    if here.index == 0:
        _check_port(here, local=local)
    # If time runs out, jax ends this process from C++ without naming the address; this line does.
    late = threading.Timer(
        min(max(timeout, 1), FOREVER),
        partial(
            write_at_once,
            f"process {here.index} of {here.count}: not all processes have come to coordinator="
            f"{here.coordinator!r} within {timeout:g} s; see that process 0 runs there, that every "
            f"process was started, with this address and a number of its own, and that no firewall "
            f"closes the port. Those that have come say this too",
        ),
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            here.coordinator,
            here.count,
            here.index,
            local_device_ids=here.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(min(max(timeout, 1), FOREVER)),
            heartbeat_timeout_seconds=math.ceil(min(heartbeat, FOREVER)),
            coordinator_bind_address=here.coordinator if local else None,
        )
    finally:
        late.cancel()


def _check_port(here: Cluster, *, local: bool) -> None:
    """Check that process 0's port is free, because jax would silently share the port."""
    host, port = here.address
    family = socket.AF_INET6 if local and ":" in host else socket.AF_INET
    try:
        socket.create_server((host if local else "", port), family=family).close()
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen at coordinator={here.coordinator!r}: {error.strerror}; give "
            f"an address of this host, and a free port"
        ) from error


def _leave(here: Cluster, process: int, timeout: float, grace: float) -> None:
    """At the end of the interpreter, wait for the other processes, which may wait for this one.

    jax waits for the other processes too, right after this function, and ends all processes if one
    does not come, for example while process 0 still evaluates alone. After an exception, the other
    processes may be in a collective that this process will never join. If this process failed
    because another process is gone, all processes fail, and the process that does not come here is
    the one that is gone. The wait is ``timeout`` seconds if all processes have ended well so far,
    or ``grace`` seconds if a process failed.
    """
    if os.getpid() != process or not jax.distributed.is_initialized():
        return
    failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    service.say("end", "failed" if failed else "done")
    began = time.monotonic()
    while len(ended := service.said("end")) < here.count:
        seconds = grace if "failed" in ended.values() else timeout
        if time.monotonic() - began >= seconds:
            missing = text_of_processes([i for i in range(here.count) if i not in ended])
            end = "has failed" if failed else "is done"
            write_at_once(
                f"process {here.index} of {here.count}: its program {end}, but {missing} did not "
                f"come to an end within {seconds:g} s: killed, or waiting for this one; it leaves "
                f"with exit code 1"
            )
            sys.stdout.flush()
            os._exit(1)
        try:
            time.sleep(LOOK)
        except KeyboardInterrupt:  # jax, which waits next, would ignore it
            os._exit(130)


def _check_seconds(**given: float) -> None:
    for name, value in given.items():
        if not is_number(value) or not value >= 0 or (name == "heartbeat" and not value):
            rule = "seconds > 0, or math.inf for ever" if name == "heartbeat" else "seconds >= 0"
            raise ValueError(f"{name}={value!r}: must be a number of {rule}")
