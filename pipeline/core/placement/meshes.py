"""Meshes with axis types: from a user's mesh to the kernel's, and results back.

JAX gives every mesh axis a type. Over an *Explicit* axis, which `jax.make_mesh` has made since jax
0.9, the sharding of an array is part of its type, and arrays of one computation agree about the
mesh; over an *Auto* axis the compiler decides. The kernel is a `shard_map` over a mesh of Auto
axes, so what enters it is freed of its types, and what leaves it gets types again:

* State lies on the user's devices, typed only if a mesh of Explicit axes is in force
  (`jax.set_mesh`) where the pipeline is made. Gradients lie as the parameters do.
* Losses and outputs have the types of the mesh in force. Where there is none, outputs have those of
  the inputs, and a loss has none, like weights and gradients: JAX differentiates scalars with
  types only under `jax.set_mesh`.

Nothing here does anything on meshes of Auto axes.
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
from pipeline.base.axes import Axes, axes_in
from pipeline.base.tree import Tree
from pipeline.core.placement.distribute import distribute
from pipeline.core.placement.zero import kernel_spec


def mesh_in_force() -> Any:
    """The mesh of `jax.set_mesh` without devices, or None; within a shard_map there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def check_no_mesh_for_programs() -> None:
    """Raise ValueError if `jax.set_mesh` is in force, where programs of ranks cannot run."""
    if (here := mesh_in_force()) is not None:
        raise ValueError(
            f"engine='programs' under jax.set_mesh, of a mesh of {mesh_text(here)}: each rank's "
            f"programs have a mesh of their own, and JAX has one in force at a time; make and call "
            f"the pipeline outside of jax.set_mesh, or use engine='scan'"
        )


def default_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh` with its devices, None where there is none or under a trace.

    Raises:
      ValueError: it has no axis ``stage``.
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
    except ValueError:  # under a trace jax does not tell
        return None
    return None if mesh.empty else mesh


def without_types(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes: on which the kernel runs."""
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return _with_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def with_types_in_force(mesh: Mesh) -> Mesh:
    """The kernel's mesh with the axis types of the one in force: where state is put.

    Raises:
      ValueError: another mesh is in force.
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
    """The sizes and types of a mesh's axes."""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape_tuple)
    types = dict.fromkeys(kind.name for kind in mesh.axis_types)
    return f"{axes} ({', '.join(types)})"


@contextlib.contextmanager
def _entered(mesh: Mesh) -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def entered(mesh: Mesh, home: Mesh) -> AbstractContextManager[None]:
    """A context in which the kernel's mesh is in force, where one with types was.

    Args:
      mesh: the kernel's.
      home: the same with the axis types that state has.

    Raises:
      ValueError: a mesh is in force on which this pipeline's state does not lie; or a device's own
        program calls the pipeline.
    """
    _check_whole()
    here = mesh_in_force()
    if here is None:
        return contextlib.nullcontext()
    _check_meshes(mesh, here)
    if home.explicit_axes and home.axis_types != here.axis_types:
        raise ValueError(
            f"jax.set_mesh has a mesh of {mesh_text(here)}, and the pipeline was made under one of "
            f"{mesh_text(home)}, whose types its weights have: use one mesh for both"
        )
    return _entered(mesh) if here.explicit_axes else contextlib.nullcontext()


def _check_whole() -> None:
    """Check that no device's own program (`jax.pmap`, `jax.shard_map`) calls a pipeline.

    Raises:
      ValueError: one does.
    """
    manual = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    if manual:
        raise ValueError(
            f"a pipeline is called where each device runs a program of its own (jax.pmap, "
            f"jax.shard_map, or a stage of another pipeline; over {', '.join(map(repr, manual))}), "
            f"and a pipeline lays itself over devices: call it outside, under jax.jit, with data "
            f"parallelism by make_mesh(data=D, stage=S); of a pipeline within a stage put the "
            f"stages into the outer one's list"
        )


def untyped(tree: Tree, mesh: Mesh) -> Tree:
    """Arrays as the kernel takes them; no bytes move.

    Raises:
      ValueError: a traced array that lies on another mesh.
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
                f"an array of type {jax.typeof(leaf)} lies on a mesh of {mesh_text(source.mesh)}, "
                f"and the pipeline's is one of {mesh_text(mesh)}; lay inputs on the mesh that is "
                f"given to Pipeline(..., mesh=)"
            )
        return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec()))
    sharding = NamedSharding(mesh, source.spec if ours else PartitionSpec())
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return distribute(leaf, sharding)


def laid_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array of the shape of another, laid out as that is where that is part of its type."""
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
      mesh: the kernel's.
      axes: the roles of its axes.
      outputs: [N, ...] leaves.
      inputs: [N, ...] leaves.
      shared: whether they are logits that all ranks share; those stay divided over ``stage`` where
        that is even.
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
    """The kernel's results with types.

    Args:
      tree: arrays.
      mesh: whose types; None leaves them as they are.
      specs: where they lie: one `PartitionSpec` for all, or one for each leaf.
    """
    if mesh is None or not mesh.explicit_axes:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    if isinstance(specs, PartitionSpec):
        specs = [specs] * len(leaves)
    results = [
        _typed(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(treedef, results)


def _typed(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return distribute(leaf, sharding)


def typed_as_they_lie(tree: Tree, mesh: Mesh) -> Tree:
    """Arrays computed on the kernel's mesh, with the types of another, and whole over ``data``.

    Leaves that are no arrays, such as labels, stay as they are.
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
