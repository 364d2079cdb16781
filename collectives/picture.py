"""A mesh as text: the device of each part of a program, and the links between neighbours.

Letters: O = places on all axes but stage and tensor, S = ranks, T = tensor shards.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from collectives.mesh import check_mesh
from collectives.places.homes import held, process_of, slice_of
from collectives.places.sizes import STAGE, TENSOR
from collectives.places.torus import Torus, places, torus_of


def describe_mesh(mesh: Mesh, *, tables: int = 4, width: int = 100) -> str:
    """Draw the position of each device: tables of stages and tensor shards, one per outer position.

    A device is shown by its id, its process (`p3`) and slice (`s1`) if there are several of them,
    and its coordinates in the grid of chips on a TPU. The last lines count the links between
    neighbours: links of a TPU slice, other slices, other processes.

    Args:
      mesh: a mesh with an axis `stage`.
      tables: the most tables to show.
      width: the most characters in a line of a table.

    Raises:
      TypeError: not a `jax.sharding.Mesh`.
      ValueError: no axis `stage`.
    """
    check_mesh(mesh)
    outer = [name for name in mesh.axis_names if name not in (STAGE, TENSOR)]
    inner = [name for name in (STAGE, TENSOR) if name in mesh.axis_names]
    order = [mesh.axis_names.index(name) for name in (*outer, *inner)]
    sizes = [mesh.shape[name] for name in outer]
    grid = mesh.devices.transpose(order).reshape(-1, mesh.shape[STAGE], mesh.shape.get(TENSOR, 1))
    lines = [_heading(mesh)]
    for number, (index, table) in enumerate(zip(np.ndindex(*sizes), grid, strict=True)):
        if number == tables:
            more = len(grid) - tables
            lines.append(f"... and {more} more table{'s' if more > 1 else ''}")
            break
        where = ", ".join(f"{name} {i}" for name, i in zip(outer, index, strict=True))
        lines += _table(mesh, where, table, width)
    lines += _between(STAGE, grid)
    if grid.shape[2] > 1:
        lines += _between(TENSOR, grid.swapaxes(1, 2))
    return "\n".join(lines)


def _heading(mesh: Mesh) -> str:
    """Write the heading, such as ``mesh data 2 x stage 4: 8 devices (cpu)``."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    devices = list(mesh.devices.flat)
    kind = getattr(devices[0], "device_kind", devices[0].platform)
    text = f"mesh {axes}: {len(devices)} device{'s' if len(devices) > 1 else ''} ({kind})"
    client = getattr(devices[0], "client", None)
    idle = len(client.devices()) - len(devices) if client is not None else 0
    if idle > 0:
        text += f", {idle} more idle"
    counts = Counter(map(process_of, devices))
    return f"{text}, {held(counts)}" if len(counts) > 1 else text


def _table(mesh: Mesh, where: str, table: np.ndarray, width: int) -> list[str]:
    """Write [S, T] devices as lines after a heading; columns that do not fit are left out."""
    show = _shown(mesh)
    columns = [[where, *(f"stage {rank}" for rank in range(len(table)))]]
    for shard in range(table.shape[1]):
        title = f"{TENSOR} {shard}" if TENSOR in mesh.axis_names else "device"
        columns.append([title, *(show(device) for device in table[:, shard])])
    widths = [max(map(len, column)) + 2 for column in columns]
    fit = sum(total <= width for total in itertools.accumulate(widths))
    if fit < len(columns):
        fit = max(2, sum(total <= width - 5 for total in itertools.accumulate(widths)))
        columns = [*columns[:fit], ["...", *["..."] * len(table)]]
        widths = [*widths[:fit], 5]
    rows = zip(*columns, strict=True)
    return ["".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _shown(mesh: Mesh) -> Any:
    """Make the function that prints one device of this mesh."""
    devices = list(mesh.devices.flat)
    processes = len(set(map(process_of, devices))) > 1
    slices = len(set(map(slice_of, devices))) > 1
    chips = places(devices) is not None

    def show(device: Any) -> str:
        text = str(device.id)
        text += f" s{slice_of(device)}" if slices else ""
        text += f" p{process_of(device)}" if processes else ""
        return text + (f" ({','.join(map(str, device.coords))})" if chips else "")

    return show


def _between(axis: str, grid: np.ndarray) -> list[str]:
    """Describe the links between neighbours of [O, S, ...] devices along the second axis."""
    ranks, slices = grid.shape[1], _slices(grid)
    if ranks == 1:
        return []
    if slices:
        return _links(axis, grid, slices)
    if len(set(map(process_of, grid.flat))) == 1:
        return []
    pairs = list(_pairs(grid, range(ranks - 1)))
    apart = sum(process_of(a) != process_of(b) for a, b in pairs)
    return [f"{axis} neighbours on different processes: {apart} of {len(pairs)}"]


def _links(axis: str, grid: np.ndarray, slices: dict[int, Torus]) -> list[str]:
    """Describe the links of TPU slices between neighbours."""

    def distance(a: Any, b: Any) -> str:
        if slice_of(a) != slice_of(b):
            return "another slice"
        torus = slices[slice_of(a)]
        (first, second) = (np.array([*d.coords, getattr(d, "core_on_chip", 0)]) for d in (a, b))
        hops = int(torus.hops(second - first))
        return f"{hops} hop{'' if hops == 1 else 's'}"

    texts = []
    for starts in (range(grid.shape[1] - 1), [grid.shape[1] - 1]):
        found = Counter(itertools.starmap(distance, _pairs(grid, starts)))
        texts.append(", ".join(f"{what} x {found[what]}" for what in sorted(found)))
    return [f"{axis} neighbours: {texts[0]}; from the last back to the first: {texts[1]}"]


def _slices(grid: np.ndarray) -> dict[int, Torus] | None:
    """Find the torus of each slice; None if devices have no coordinates or do not fill a box."""
    members: dict[int, list[Any]] = {}
    for device in grid.flat:
        members.setdefault(slice_of(device), []).append(device)
    found = {index: torus_of(devices) for index, devices in members.items()}
    return None if None in found.values() else found  # type: ignore[return-value]


def _pairs(grid: np.ndarray, starts: Any) -> Iterator[tuple[Any, Any]]:
    """Pair devices at these positions of the second axis with the next; the axis is a ring."""
    for start in starts:
        yield from zip(grid[:, start].flat, grid[:, (start + 1) % grid.shape[1]].flat, strict=True)
