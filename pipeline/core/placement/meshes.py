"""Meshes with axis types: conversion from the user's mesh to the kernel's mesh, and back.

JAX gives every mesh axis a type. `jax.make_mesh` makes *Explicit* axes since jax 0.9. Over an
Explicit axis the sharding of an array is a part of its type, and all arrays of a computation must
have one mesh. Over an *Auto* axis the compiler decides. The kernel is a `shard_map` over a mesh of
Auto axes, so its operands lose their axis types, and its results get axis types again:

* State is on the user's devices. Its arrays have axis types only if a mesh of Explicit axes is in
  force (`jax.set_mesh`) when the pipeline is made. Gradients have the shardings of parameters.
* Losses and outputs have the types of the mesh in force. Without such a mesh, outputs have the
  types of the inputs, and a loss, like weights and gradients, has none: JAX differentiates scalars
  with types only under `jax.set_mesh`.

On meshes of Auto axes, this module changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from collectives import DATA, STAGE
from collectives.compat import without_mesh
from pipeline.base.axes import Axes, axes_in
from pipeline.base.tree import Tree
from pipeline.core.placement.distribute import with_sharding
from pipeline.core.placement.zero import kernel_spec


def mesh_in_force() -> Any:
    """Return the abstract mesh of `jax.set_mesh`; None without such a mesh or in a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def default_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh` with its devices; None without one or under a trace.

    Raises:
      ValueError: the mesh has no axis ``stage``.
    """
    mesh = _devices_in_force() if mesh_in_force() is not None else None
    if mesh is not None and STAGE not in mesh.axis_names:
        raise ValueError(
            f"jax.set_mesh has a mesh of {mesh_text(mesh)}, and a pipeline runs along an axis "
            f"{STAGE!r}: name one of its axes so, or make the pipeline outside of jax.set_mesh"
        )
    return mesh


def _devices_in_force() -> Mesh | None:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX raises under a trace
        return None
    return None if mesh.empty else mesh


def without_types(mesh: Mesh) -> Mesh:
    """Return the kernel's mesh: the mesh with all axes Auto."""
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return _with_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def with_types_in_force(mesh: Mesh) -> Mesh:
    """Return the mesh for state: the kernel's mesh with the axis types of the mesh in force.

    Raises:
      ValueError: the mesh in force has other axes, sizes or devices.
    """
    here = mesh_in_force()
    if here is None:
        return mesh
    _check_meshes(mesh, here)
    return _with_types(mesh, here.axis_types) if here.explicit_axes else mesh


def _with_types(mesh: Mesh, types: Sequence[AxisType]) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(types))


def _check_meshes(mesh: Mesh, here: Any) -> None:
    same = mesh.shape_tuple == here.shape_tuple
    in_force = _devices_in_force()
    if not same or (in_force is not None and not np.array_equal(in_force.devices, mesh.devices)):
        raise ValueError(
            f"jax.set_mesh has a mesh of {mesh_text(here)}, and the pipeline's is one of "
            f"{mesh_text(mesh)}{' of other devices' * same}; jax computes "
            f"with one mesh at a time: give the pipeline that mesh, Pipeline(..., mesh=mesh), or "
            f"leave jax.set_mesh before this line"
        )


def mesh_text(mesh: Any) -> str:
    """Describe a mesh by the sizes and types of its axes."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape_tuple)
    types = dict.fromkeys(kind.name for kind in mesh.axis_types)
    return f"{axes} ({', '.join(types)})"


@contextlib.contextmanager
def _entered(mesh: Mesh) -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def entered(
    mesh: Mesh | None, home: Mesh, *, programs: bool = False
) -> AbstractContextManager[None]:
    """Make a context that replaces a mesh in force with Explicit axes by the kernel's mesh.

    With ``programs`` no mesh is in force within the context, because each rank's programs have a
    mesh of their own. ``mesh`` is None with ``stage_meshes``. ``home`` is the kernel's mesh with
    the axis types of state.

    Raises:
      ValueError: the mesh in force is not the mesh of this pipeline's state; or the call is within
        a `jax.pmap` or a `jax.shard_map`.
    """
    _check_whole()
    here = mesh_in_force()
    if here is None or mesh is None:
        return without_mesh() if programs else contextlib.nullcontext()
    _check_meshes(mesh, here)
    if home.explicit_axes and home.axis_types != here.axis_types:
        raise ValueError(
            f"jax.set_mesh has a mesh of {mesh_text(here)}, and the pipeline was made under one of "
            f"{mesh_text(home)}, whose types its weights have: use one mesh for both"
        )
    if programs:
        return without_mesh()
    return _entered(mesh) if here.explicit_axes else contextlib.nullcontext()


def _check_whole() -> None:
    """Raise ValueError if the pipeline is called within `jax.pmap` or `jax.shard_map`."""
    manual = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    if manual:
        raise ValueError(
            f"a pipeline is called where each device runs a program of its own (jax.pmap, "
            f"jax.shard_map, or a stage of another pipeline; over {', '.join(map(repr, manual))}), "
            f"and a pipeline runs on many devices: call it outside, under jax.jit, with data "
            f"parallelism by make_mesh(data=D, stage=S); instead of a pipeline within a stage, put "
            f"its stages into the outer pipeline's list"
        )


def untyped(tree: Tree, mesh: Mesh) -> Tree:
    """Drop the axis types of arrays, as the kernel needs; no bytes move.

    Raises:
      ValueError: a traced array is on another mesh.
    """
    return jax.tree.map(lambda leaf: _untyped(leaf, mesh), tree)


def _untyped(leaf: Any, mesh: Mesh) -> Any:
    source = _typed_sharding(leaf)
    if source is None:
        return leaf
    ours = source.mesh.shape_tuple == mesh.shape_tuple
    if isinstance(leaf, jax.core.Tracer):
        if not ours:
            raise ValueError(
                f"an array of type {jax.typeof(leaf)} is on a mesh of {mesh_text(source.mesh)}, "
                f"and the pipeline's mesh is {mesh_text(mesh)}; put inputs on the mesh that is "
                f"given to Pipeline(..., mesh=)"
            )
        return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec()))
    return with_sharding(leaf, NamedSharding(mesh, source.spec if ours else PartitionSpec()))


def laid_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Give an array the sharding in the type of ``like``, of equal shape; else return it."""
    sharding = _typed_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def _typed_sharding(leaf: Any) -> Any:
    """Return the sharding of an array or a type, if its type contains a sharding."""
    if isinstance(leaf, jax.core.Tracer):
        sharding: Any = jax.typeof(leaf).sharding
    else:
        sharding = getattr(leaf, "sharding", None)
    named = isinstance(sharding, NamedSharding)
    return sharding if named and sharding.mesh.explicit_axes else None


def mesh_of_results(mesh: Mesh, inputs: Tree = ()) -> Mesh | None:
    """Return the mesh of results' types: the mesh in force, or the inputs' mesh; else None."""
    here = mesh_in_force()
    if here is None:
        shardings = filter(None, map(_typed_sharding, jax.tree.leaves(inputs)))
        typed = (x.mesh for x in shardings if x.mesh.shape_tuple == mesh.shape_tuple)
        here = next(typed, None)
    return _with_types(mesh, here.axis_types) if here and here.explicit_axes else None


def outputs_specs(
    mesh: Mesh, axes: Axes, outputs: Tree, inputs: Tree, *, shared: bool
) -> list[PartitionSpec]:
    """Return specs of outputs: rows like the inputs' typed specs, or over row axes.

    Args:
      outputs: [N, ...] leaves.
      inputs: [N, ...] leaves.
      shared: whether outputs are logits that all ranks share; such logits stay divided over
        ``stage`` if the division is even.
    """
    shardings = filter(None, map(_typed_sharding, jax.tree.leaves(inputs)))
    rows = next((x.spec[0] for x in shardings if len(x.spec) and x.spec[0] is not None), None)
    rows = rows or next(iter(axes.row_spec), None)
    later = tuple(axes.output_spec)[1:]  # position axes

    def spec_of(leaf: Any) -> PartitionSpec:
        divided = shared and leaf.shape[-1] % mesh.shape[STAGE] == 0
        if not divided or STAGE in axes_in(rows):
            return PartitionSpec(rows, *later)
        return PartitionSpec(rows, *later, *(None,) * (leaf.ndim - 2 - len(later)), STAGE)

    return [spec_of(leaf) for leaf in jax.tree.leaves(outputs)]


def typed(tree: Tree, mesh: Mesh | None, specs: Any) -> Tree:
    """Give the kernel's results axis types.

    Args:
      mesh: the mesh with the axis types; None changes nothing.
      specs: the specs of the arrays: one `PartitionSpec` for all, or one for each leaf.
    """
    if mesh is None or not mesh.explicit_axes:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    if isinstance(specs, PartitionSpec):
        specs = [specs] * len(leaves)
    pairs = zip(leaves, specs, strict=True)
    results = [with_sharding(leaf, NamedSharding(mesh, spec)) for leaf, spec in pairs]
    return jax.tree.unflatten(treedef, results)


def typed_as_they_lie(tree: Tree, mesh: Mesh) -> Tree:
    """Give arrays of the kernel's mesh the axis types of ``mesh``, without sharding over ``data``.

    Leaves that are no arrays, such as labels, are not changed.
    """
    if not mesh.explicit_axes:
        return tree
    further = frozenset(mesh.axis_names) - {DATA, STAGE}

    def typed_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        lies = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
        spec = lies.spec if isinstance(lies, NamedSharding) else PartitionSpec()
        return typed(leaf, mesh, kernel_spec(spec, further))

    return jax.tree.map(typed_leaf, tree)
