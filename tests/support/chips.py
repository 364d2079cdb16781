"""Devices that exist on paper: hosts of any size, and TPU slices as libtpu numbers them.

JAX takes any hashable object for a device of a mesh on which nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """The attributes of a device that a layout reads."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"
    client: Any = None


@dataclass(frozen=True)
class Chip(Device):
    """A device with a place."""

    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def hosts(*counts: int) -> list[Any]:
    """Processes that hold so many devices."""
    homes = [process for process, count in enumerate(counts) for _ in range(count)]
    return [Device(n, process) for n, process in enumerate(homes)]


def tpu(kind: str, x: int, y: int, z: int = 1, *, slice_index: int = 0) -> list[Any]:
    """One slice: a process holds 2 x 2 chips, ids run along x, then y, then z."""
    across = -(-x // 2)
    per_layer = across * -(-y // 2)
    first = 100_000 * slice_index
    chips = [
        Chip(
            id=first + i + x * (j + y * k),
            process_index=slice_index * per_layer * z + k * per_layer + j // 2 * across + i // 2,
            slice_index=slice_index,
            platform="tpu",
            device_kind=kind,
            coords=(i, j, k),
        )
        for k in range(z)
        for j in range(y)
        for i in range(x)
    ]
    return sorted(chips, key=lambda chip: chip.process_index)


V5E, V5P = "TPU v5 lite", "TPU v5"
