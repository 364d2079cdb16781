"""The grid of chips in a TPU slice: places, links, and hops between devices of a mesh.

Links join neighbouring chips; in some slices they also join the two ends of a line. The grid has
the axes x, y, z and core; two cores of one chip need no link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Place = tuple[int, ...]

_CHIP = 3  # the number of axes of chips: x, y and z
_CUBES = ("TPU v4", "TPU v5", "TPU v5p", "TPU7", "TPU7x")  # closed if all lengths are 4 n
_SQUARES = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")  # lines of 16 chips are closed


@dataclass(frozen=True)
class Torus:
    """A box of chips.

    Attributes:
      lengths: [4] the length of each axis.
      closed: [4] whether a link joins the two ends of an axis.
    """

    lengths: tuple[int, ...]
    closed: tuple[bool, ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.lengths)

    def hops(self, apart: np.ndarray) -> np.ndarray:
        """Count [...] links on the shortest path, for [..., 4] differences of places."""
        apart = np.abs(apart)
        around = np.where(self.closed, np.asarray(self.lengths) - apart, apart)
        return np.minimum(apart, around)[..., :_CHIP].sum(axis=-1)


def places(devices: Sequence[Any]) -> list[Place] | None:
    """Return [N] places in the grid, counted from 0; None for devices without coordinates."""
    found = []
    for device in devices:
        coords = getattr(device, "coords", None)
        if coords is None or len(coords) != _CHIP:
            return None
        found.append((*coords, getattr(device, "core_on_chip", 0)))
    corner = [min(column) for column in zip(*found, strict=True)]
    return [tuple(int(a - b) for a, b in zip(place, corner, strict=True)) for place in found]


def torus_of(devices: Sequence[Any]) -> Torus | None:
    """Find the box that devices of one slice fill; None if they fill no box."""
    found = places(devices)
    if not found or len(set(found)) != len(devices):
        return None
    lengths = tuple(max(column) + 1 for column in zip(*found, strict=True))
    if math.prod(lengths) != len(devices):
        return None
    return Torus(lengths, (*_closed(devices, lengths[:_CHIP]), False))


def ring_hops(grid: np.ndarray, axis: int, torus: Torus) -> np.ndarray:
    """Count the hops from each device of a grid to the next along an axis, as a ring."""
    where = np.array(places(list(grid.flat))).reshape(*grid.shape, len(torus.lengths))
    return torus.hops(np.roll(where, -1, axis) - where)


def _closed(devices: Sequence[Any], chips: Place) -> tuple[bool, ...]:
    """Tell which lines of chips are closed to a ring, by the kind and size of a whole slice."""
    client = getattr(devices[0], "client", None)
    if client is not None and len(client.devices()) != len(devices):
        return (False,) * _CHIP
    kind = getattr(devices[0], "device_kind", "")
    if kind in _CUBES:
        return (not any(length % 4 for length in chips),) * _CHIP
    return tuple(kind in _SQUARES and length == 16 for length in chips)
