"""The start of a program that may be one of several processes."""

from __future__ import annotations

from typing import Any

import jax

from pipeline.processes.agreement import fields_of
from pipeline.processes.cluster import Cluster, find
from pipeline.processes.rendezvous import LOOPBACK, meet
from pipeline.processes.watch import Watch

# jax takes a process for dead that was suspended for longer than this; `Watch` knows better.
SUSPENDED = 24 * 3600
BETWEEN_CPUS = "jax_cpu_collectives_implementation"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    config: Any = None,
    timeout: float = 300.0,
    grace: float = 5.0,
    heartbeat: float = 100.0,
) -> Cluster:
    """Make this process one of a job; with one process, do nothing.

    Call it before the first use of a device. What is not given comes from
    ``python -m pipeline launch``, or from SLURM, Open MPI, a Kubernetes job or a TPU pod. It waits
    for all processes, compares their code, versions and options, and starts `jax.distributed`, with
    gloo for collectives between CPUs. From then on, a process whose peer dies, hangs, or ends its
    program while it is needed, says so and ends with exit code 75; and a process whose program is
    done waits until those of all are.

    Args:
      coordinator: ``host:port`` of process 0, with a port that is free there.
      num_processes: of the job.
      process_id: of this process, 0 <= process_id < num_processes.
      config: options that must be the same everywhere: a mapping, a dataclass or a namespace.
      timeout: seconds to wait for the others.
      grace: seconds this process has to end by itself after another died.
      heartbeat: seconds without a sign of life until a process counts as hung; `math.inf` for ever.

    Returns:
      Where this process is: ``.index`` of ``.count``.

    Raises:
      RuntimeError: jax.distributed is initialised already.
      TimeoutError: the coordinator cannot be reached, or somebody did not come.
      ValueError: a part of the address, or a time, is missing or wrong; or processes do not run
        the same program: which field, which values, on which processes.
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "initialize() was called in a process where jax.distributed is initialised already; "
            "call it once, and instead of jax.distributed.initialize()"
        )
    _check_seconds(timeout=timeout, grace=grace, heartbeat=heartbeat)
    cluster = find(coordinator, num_processes, process_id, timeout=timeout)
    if cluster.count == 1:
        return cluster
    if getattr(jax.config, BETWEEN_CPUS) in (None, "none"):
        jax.config.update(BETWEEN_CPUS, "gloo")
    links = meet(cluster, fields_of(config), timeout)
    Watch(links, grace, heartbeat).start()
    here = cluster.address[0].startswith(LOOPBACK)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.count,
        cluster.index,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(max(timeout, 1)),
        heartbeat_timeout_seconds=SUSPENDED,
        coordinator_bind_address=cluster.coordinator if here else None,
    )
    return cluster


def _check_seconds(**given: float) -> None:
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not value >= 0 or (name == "heartbeat" and not value):
            rule = "seconds > 0, or math.inf for ever" if name == "heartbeat" else "seconds >= 0"
            raise ValueError(f"{name}={value!r}: must be a number of {rule}")
