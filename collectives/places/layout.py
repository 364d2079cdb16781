"""A layout of mesh axes that puts neighbours of a mesh on neighbouring chips.

JAX's `mesh_utils.create_device_mesh` gives every mesh axis a part of the grid of chips, but orders
that part row by row: after each row it jumps to the start of the next row. Here every axis gets a
box, and visits its places as a snake, or as a closed tour if the box has one.

`collectives.places.torus` defines the grid of chips. A box has one length for each axis of the
grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from collectives.places.homes import slice_of
from collectives.places.sizes import factorizations
from collectives.places.torus import Place, Torus, places, ring_hops, torus_of

Walk = tuple[Place, ...]  # every place of a box, in the order of a walk


def lay_out(devices: Sequence[Any], shape: tuple[int, ...], *, whole: bool) -> np.ndarray:
    """Arrange devices of TPU slices as a grid, with slices along its first axis.

    If there are more slices than parts of the first axis, the second axis (stage) crosses slices
    too, with a run of neighbours in each slice.

    Args:
      devices: as many as the grid has places; the devices of one slice are consecutive.
      shape: sizes of the mesh axes: data, stage, then the axes that must be within a slice.
      whole: whether these are all existing devices.

    Raises:
      ValueError: the slices cannot share these axes equally.
    """
    slices = [list(members) for _, members in itertools.groupby(devices, key=slice_of)]
    if len(slices) == 1:
        return _in_slice(devices, shape, whole=whole)
    data, stage, *inner = shape
    outer = math.gcd(data, len(slices))
    between = len(slices) // outer  # the number of slices that one pipeline uses
    sizes = {len(members) for members in slices}
    if stage % between or len(sizes) > 1:
        each = "/".join(str(len(members)) for members in slices)
        raise ValueError(
            f"data={data} stage={stage} on {len(slices)} slices of {each} devices: slices are "
            f"joined by slow links, so only data and stage cross them, each slice with the same "
            f"part; make data or stage a multiple of {len(slices)}"
        )
    part = (data // outer, stage // between, *inner)
    grids = [_in_slice(members, part, whole=whole) for members in slices]
    rows = [np.concatenate(grids[n : n + between], 1) for n in range(0, len(grids), between)]
    return np.concatenate(rows, 0)


def _in_slice(devices: Sequence[Any], shape: tuple[int, ...], *, whole: bool) -> np.ndarray:
    """Choose the layout with the fewest hops, first those along the last axis.

    The candidates are JAX's layout, which wins if it is equally good, and the best snakes. JAX
    refuses a part of a slice that is no box; the devices then keep the order given.
    """
    torus, candidates = torus_of(devices), []
    if whole:
        try:
            candidates.append(
                mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
            )
        except (NotImplementedError, ValueError, AssertionError):
            candidates.append(as_grid(devices, shape))
    if torus is None:
        return candidates[0] if candidates else as_grid(devices, shape)
    at = dict(zip(places(devices) or (), devices, strict=True))
    candidates.append(as_grid([at[place] for place in _snakes(torus, shape)], shape))
    return min(candidates, key=lambda grid: _score(grid, torus))


def _score(grid: np.ndarray, torus: Torus) -> list[int]:
    """Count the hops along each axis, last axis first: of the ring, and without its last step."""
    around = [(axis, ring_hops(grid, axis, torus)) for axis in reversed(range(grid.ndim))]
    return [int(hops.sum()) for axis, ring in around for hops in (ring, np.delete(ring, -1, axis))]


def as_grid(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Arrange devices as a grid in the given order, with the last axis fastest."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape)


def _snakes(torus: Torus, shape: tuple[int, ...]) -> Iterator[Place]:
    """Return the place of each device in mesh order, for the boxes with the fewest hops."""
    best: tuple[list[int], list[Walk]] | None = None
    best_walk = functools.cache(_best_walk)  # different splits have most boxes in common
    for boxes in _splits(torus.lengths, shape):
        stride, costs, walks = (1,) * len(torus.lengths), [], []
        for box in reversed(boxes):  # the fastest axis is innermost
            hops, walk = best_walk(box, stride, torus)
            costs += [count * torus.size // len(walk) for count in hops]
            walks.append(tuple(_times(place, stride) for place in walk))
            stride = _times(stride, box)
        if best is None or costs < best[0]:
            best = costs, walks
    for parts in itertools.product(*reversed(best[1] if best else ())):
        yield tuple(map(sum, zip(*parts, strict=True)))


def _splits(lengths: Place, shape: tuple[int, ...]) -> Iterator[tuple[Place, ...]]:
    """Yield every way to give each mesh axis a box such that all boxes together fill the grid."""
    if not lengths:
        if all(size == 1 for size in shape):
            yield ((),) * len(shape)
        return
    for parts in factorizations(lengths[0], len(shape)):
        if any(size % part for size, part in zip(shape, parts, strict=True)):
            continue
        left = tuple(size // part for size, part in zip(shape, parts, strict=True))
        for boxes in _splits(lengths[1:], left):
            yield tuple((part, *box) for part, box in zip(parts, boxes, strict=True))


def _best_walk(box: Place, stride: Place, torus: Torus) -> tuple[tuple[int, int], Walk]:
    """Find the hops (as in `_score`) and the places of the shortest ring through a strided box."""

    def hops(walk: Walk) -> tuple[int, int]:
        where = np.array([_times(place, stride) for place in walk])
        each = torus.hops(np.roll(where, -1, 0) - where)
        return int(each.sum()), int(each[:-1].sum())

    best = min(_walks(box), key=hops)
    return hops(best), best


def _walks(box: Place) -> Iterator[Walk]:
    """Yield snakes and closed tours through a box, for every order of its axes."""
    axes = [axis for axis, length in enumerate(box) if length > 1]
    for order in itertools.permutations(axes):
        lengths = [box[axis] for axis in order]
        for walk in filter(None, (_snake(lengths), _tour(lengths))):
            yield tuple(
                tuple(place[order.index(axis)] if axis in order else 0 for axis in range(len(box)))
                for place in walk
            )


def _snake(lengths: Sequence[int]) -> list[Place]:
    """Walk along the last axis to and fro, with a step along the previous axis at each turn."""
    if not lengths:
        return [()]
    inner = _snake(lengths[1:])
    return [(n, *place) for n in range(lengths[0]) for place in (inner[::-1] if n % 2 else inner)]


def _tour(lengths: Sequence[int]) -> list[Place]:
    """Find a closed walk of single steps through a box; empty if there is none.

    All axes but the last form a snake of R places. The tour goes to and fro through the other
    columns of the R rows, and returns along the first column; R must be even.
    """
    rows, columns = _snake(lengths[:-1]), range(lengths[-1]) if lengths else range(0)
    if len(rows) % 2 or len(columns) < 2:
        return []
    there = [
        (*row, column)
        for n, row in enumerate(rows)
        for column in (columns[:0:-1] if n % 2 else columns[1:])
    ]
    return there + [(*row, 0) for row in reversed(rows)]


def _times(a: Place, b: Place) -> Place:
    return tuple(x * y for x, y in zip(a, b, strict=True))
