"""Devices and the processes (hosts) that hold them.

A process is an address outside the chip: communication within a process is cheap, and each process
feeds the rows of the devices that it holds. Groups of devices are therefore divided evenly between
processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from collectives.places.sizes import DATA, text


def process_of(device: Any) -> int:
    """Return the index of the process that holds a device."""
    return int(getattr(device, "process_index", 0))


def processes_of(devices: Iterable[Any]) -> set[int]:
    """Return the indices of the processes that hold some of the devices."""
    return {process_of(device) for device in devices}


def slice_of(device: Any) -> int:
    """Return the index of the TPU slice, or of the group of GPUs, to which a device belongs."""
    return int(getattr(device, "slice_index", 0) or 0)


def by_process(devices: Sequence[Any]) -> list[Any]:
    """Group devices by slice, then by process; keep the given order otherwise."""
    return sorted(devices, key=lambda device: (slice_of(device), process_of(device)))


def take(devices: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """Take as many devices as the sizes need, the same number from each process.

    Args:
      devices: at least as many as needed; the devices of one process are consecutive.
      sizes: the sizes of the axes, slowest first.

    Raises:
      ValueError: the processes cannot give equal numbers.
    """
    needed = math.prod(sizes.values())
    counts = Counter(map(process_of, devices))
    per_process, rest = divmod(needed, len(counts))
    if rest or per_process > min(counts.values()):
        most = min(counts.values())
        raise ValueError(
            f"{text(sizes)} needs {needed} devices, the same number from each of {len(counts)} "
            f"processes, but {held(counts)}; use a multiple of {len(counts)} devices, at most "
            f"{most * len(counts)}, or start processes that hold equal numbers"
        )
    chosen: list[Any] = []
    for _, members in groupby(devices, key=process_of):
        chosen += list(members)[:per_process]
    return chosen


def held(counts: Mapping[int, int]) -> str:
    """Write counts as ``processes 0-2 have 4 devices each, process 3 has 2``."""
    parts = []
    for count, members in groupby(sorted(counts), key=lambda process: counts[process]):
        run = list(members)
        who = f"process {run[0]} has" if len(run) == 1 else f"processes {run[0]}-{run[-1]} have"
        what = f"{count} device{'s' if count > 1 else ''}"
        parts.append(f"{who} {what}{' each' if len(run) > 1 else ''}")
    return ", ".join(parts)


def straddling(sizes: Mapping[str, int], per_process: int, processes: int) -> str | None:
    """Describe the fault of groups that divide processes unevenly; None if there is no fault.

    The devices of a group, with the same index on all slower axes, are consecutive. Either a
    process must hold whole groups, or a group must hold whole processes.

    Args:
      sizes: the sizes of the axes, slowest first.
    """
    inner = [name for name in sizes if name != DATA]
    for start in reversed(range(len(inner))):
        group = {name: sizes[name] for name in inner[start:]}
        size = math.prod(group.values())
        if per_process % size and size % per_process:
            return (
                f"{text(group)}: a group of {size} devices would straddle processes unevenly, "
                f"since each of {processes} gives {per_process}; make {' * '.join(group)} a "
                f"divisor or a multiple of {per_process}"
            )
    return None
