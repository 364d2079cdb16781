"""The option ``stage_meshes=``: a mesh for each rank; the meshes may differ.

Letters: S ranks, K stages. All ranks split the batch in one way, so that sender and receiver of a
message have equal parts. Along all other axes each rank has as many devices as its stages need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from collectives import STAGE
from collectives.places.homes import processes_of
from pipeline.base.axes import Axes, axes_in
from pipeline.base.tree import Tree


def check_stage_meshes(given: Any) -> tuple[Mesh, ...]:
    """Return [S] meshes with equal axis names, all with a ``stage`` axis of size 1.

    A mesh that lacks an axis gets the axis with size 1.

    Raises:
      ValueError: the option is no list of meshes, a mesh has several stages, two meshes have a
        device in common, or a process has no device of any mesh.
    """
    remedy = "give one jax.sharding.Mesh for each rank, such as stage_meshes=[encoder, decoder]"
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(isinstance(mesh, Mesh) for mesh in given):
        raise ValueError(f"stage_meshes={given!r}: {remedy}")
    names = list(dict.fromkeys([STAGE, *(name for mesh in given for name in mesh.axis_names)]))
    rank_of: dict[Any, int] = {}
    for rank, mesh in enumerate(given):
        if mesh.shape.get(STAGE, 1) != 1:
            raise ValueError(
                f"stage_meshes[{rank}] has {mesh.shape[STAGE]} entries on its axis 'stage', and it "
                f"is the mesh of one rank; {remedy}"
            )
        for device in mesh.devices.flat:
            if device in rank_of:
                raise ValueError(
                    f"stage_meshes[{rank_of[device]}] and stage_meshes[{rank}] overlap: both have "
                    f"{device}; give each rank devices of its own, and stages that are to share "
                    f"devices one mesh (with a schedule of several stages per rank)"
                )
            rank_of[device] = rank
    owners = processes_of(rank_of)
    if idle := sorted(set(range(jax.process_count())) - owners):
        raise ValueError(
            f"stage_meshes= has devices of processes {sorted(owners)}, and there are also {idle}: "
            f"each process runs the programs of its ranks; give each at least one device of a "
            f"mesh, or start fewer processes"
        )
    return tuple(_with_axes(mesh, names) for mesh in given)


def _with_axes(mesh: Mesh, names: Sequence[str]) -> Mesh:
    """Return the mesh with axes of these names in this order, all of them Auto."""
    own = [mesh.axis_names.index(name) for name in names if name in mesh.axis_names]
    shape = [mesh.shape.get(name, 1) for name in names]
    devices = mesh.devices.transpose(own).reshape(shape)
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def first_of(meshes: Sequence[Mesh], num_stages: int) -> Mesh:
    """Return the first mesh after checking that K stages divide among the ranks."""
    if num_stages % len(meshes):
        raise ValueError(
            f"stages has {num_stages} stages, which the ranks of {len(meshes)} stage_meshes cannot "
            f"share equally: each runs as many; stages need not be alike, so one may hold more "
            f"layers than another"
        )
    return meshes[0]


def axes_of(axes: Axes, meshes: Sequence[Mesh]) -> list[Axes]:
    """Find the roles of the axes of each of the S meshes.

    Args:
      axes: the roles of the axes of the last mesh.
      meshes: the result of `check_stage_meshes`.

    Raises:
      ValueError: meshes that split the batch differently.
    """
    for rank, mesh in enumerate(meshes):
        for axis in axes.split:
            if mesh.shape[axis] != meshes[-1].shape[axis]:
                raise ValueError(
                    f"stage_meshes[{rank}] has {mesh.shape[axis]} devices along {axis!r}, over "
                    f"which the batch is split, and the last has {meshes[-1].shape[axis]}: "
                    f"messages go from each part of a microbatch to the same part; give all "
                    f"meshes as many, and let them differ along other axes, such as 'tensor'"
                )
    return [dataclasses.replace(axes, sizes=tuple(mesh.shape.values())) for mesh in meshes]


def check_parts_agree(sent: Tree, received: Tree, kind: str, stage: int) -> None:
    """Raise ValueError unless the devices of both ranks have equal parts of a message.

    Args:
      kind: "operand" or "gradient".
    """
    for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(received), strict=True):
        if (a.shape, a.sharding.spec) != (b.shape, b.sharding.spec):
            axes = axes_in(a.sharding.spec[0])
            end = "input" if kind == "operand" else "output"
            raise ValueError(
                f"the {end} of stages[{stage}] has a part for each device along "
                f"{' x '.join(map(repr, axes))}, {a.shape[0]} on one side of the message and "
                f"{b.shape[0]} on the other, whose stage_meshes differ: let the stage join its "
                f"parts before it returns (jax.lax.all_gather), or give both ranks meshes of one "
                f"shape"
            )
