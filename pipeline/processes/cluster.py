"""The job and number of this process: from arguments, then our launcher, then from jax.

jax knows SLURM, Open MPI, Kubernetes jobs and TPU pods by the environment they set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collectives.compat import find_cluster
from pipeline.base.arguments import is_whole
from pipeline.processes.names import COORDINATOR, PROCESS, PROCESSES

# jax's variable, to take other devices than jax takes for SLURM and Open MPI (one a process).
DEVICES = "JAX_LOCAL_DEVICE_IDS"

BY_HAND = (
    f"or give coordinator, num_processes and process_id; where this process is alone, "
    f"num_processes=1 or {PROCESSES}=1"
)

# Variables that show a job of several processes even if jax does not detect it: the least number
# that shows it, and the reason why jax does not.
_TORCHRUN = (
    "torchrun tells jax nothing: num_processes is its WORLD_SIZE, process_id its RANK, and the "
    "port of the coordinator another than MASTER_PORT, which is taken; start the program with "
    "`python -m pipeline launch`"
)
_SLURM = "for SLURM it wants SLURM_NTASKS, which `srun --ntasks=N` sets"
_OTHER = "it does not know this launcher"
SEVERAL = {
    "OMPI_COMM_WORLD_SIZE": (2, "for Open MPI 5 it wants a later jax, and mpi4py"),
    "PMI_SIZE": (2, "it knows no MPI but Open MPI"),
    "JOB_COMPLETION_INDEX": (0, "for Kubernetes install jax[k8s]"),
    "WORLD_SIZE": (2, _TORCHRUN),
    "SLURM_STEP_NUM_TASKS": (2, _SLURM),
    "SLURM_PROCID": (1, _SLURM),
    "MV2_COMM_WORLD_SIZE": (2, _OTHER),
    "FLUX_JOB_SIZE": (2, _OTHER),
    "JSM_NAMESPACE_SIZE": (2, _OTHER),
    "PALS_RANKID": (1, _OTHER),
    "PMIX_RANK": (1, _OTHER),
}


@dataclass(frozen=True)
class Cluster:
    """The place of a process among the processes of a job.

    Attributes:
      coordinator: ``host:port`` on which process 0 listens; empty for a single process.
      count: the number of processes in the job.
      index: the number of this process, 0 <= index < count.
      local_device_ids: the devices of this host that this process uses; None for all devices.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0
    local_device_ids: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, port = self.coordinator.rsplit(":", 1)
        return host.strip("[]"), int(port)


def find(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """Return this process's place in its job; `Cluster()` if nothing indicates other processes.

    Args:
      coordinator: ``host:port`` of process 0; this and the next two are detected if None.
      timeout: seconds that jax may wait for a name service.
      environment: the variables that a launcher has set; by default this process's variables.

    Raises:
      ValueError: a part is missing or contradicts the others, or there is a cluster, but this
        process's place in it is unknown.
    """
    environment = os.environ if environment is None else environment
    known: dict[str, Any] = {
        "coordinator": coordinator or environment.get(COORDINATOR),
        "num_processes": _number("num_processes", num_processes, environment, PROCESSES),
        "process_id": _number("process_id", process_id, environment, PROCESS),
    }
    if known["num_processes"] == 1 and not known["process_id"]:
        return Cluster()
    devices = None
    if None in known.values():
        *found, devices = _detected(known, timeout)
        known = dict(zip(known, found, strict=True))
    devices = _devices(environment) or devices
    if all(value is None for value in known.values()):
        _check_alone(environment)
        return Cluster()
    _check(known)
    if known["num_processes"] == 1:
        return Cluster()
    ids = None if devices is None else tuple(devices)
    return Cluster(known["coordinator"], known["num_processes"], known["process_id"], ids)


def _number(
    name: str, given: int | None, environment: Mapping[str, str], variable: str
) -> int | None:
    if given is not None:
        return given
    text = environment.get(variable)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{variable}={text!r}: must be an integer >= 0, the job's {name}")
    return None if text is None else int(text)


def _devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the devices of this host that the environment gives to this process."""
    text = environment.get(DEVICES)
    if not text:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"{DEVICES}={text!r}: must be the numbers of this process's devices on its host, with "
            f"commas between them, such as 0,1,2,3"
        )
    return tuple(map(int, numbers))


def _detected(known: Mapping[str, Any], timeout: float) -> tuple[Any, ...]:
    """Return (coordinator, processes, process, local devices) as jax detects them; else None."""
    # Detect before connecting, because a failed connection kills the process.
    coordinator, count, index = known.values()
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        return find_cluster(coordinator, count, index, seconds=int(timeout))
    except Exception as error:  # from sockets, Kubernetes or number parsing
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(
            f"jax sees that this process belongs to a cluster, but cannot tell its place: "
            f"{type(error).__name__}: {error}{cause}\nMend that, {BY_HAND}"
        ) from error


def _check_alone(environment: Mapping[str, str]) -> None:
    """Refuse to train alone in a process that is one of several."""
    for variable, (least, why) in SEVERAL.items():
        text = environment.get(variable, "")
        if text.isdecimal() and int(text) >= least:
            raise ValueError(
                f"{variable}={text}: this process seems to be one of several, but jax finds no "
                f"others; {why}, {BY_HAND}"
            )


def _check(known: Mapping[str, Any]) -> None:
    """Check that all values are known and valid."""
    missing = [name for name, value in known.items() if value is None]
    if missing:
        has = ", ".join(f"{name}={value!r}" for name, value in known.items() if value is not None)
        raise ValueError(
            f"{has}, but {' and '.join(missing)} unknown, and no SLURM, Open MPI, Kubernetes or "
            f"TPU pod that tells; give all three, or start the program with "
            f"`python -m pipeline launch`"
        )
    coordinator, count, index = known.values()
    for name, value, least in (("num_processes", count, 1), ("process_id", index, 0)):
        if not is_whole(value, least):
            raise ValueError(f"{name}={value!r}: must be an integer >= {least}")
    if index >= count:
        raise ValueError(
            f"process_id={index}: {count} processes are numbered 0..{count - 1}; give each its own"
        )
    host, colon, port = str(coordinator).rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"coordinator={coordinator!r}: must be host:port, a name or address of process 0's "
            f"host and a free port there, such as '10.0.0.1:8476'"
        )
