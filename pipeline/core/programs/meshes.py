"""The meshes of ranks, and arrays that pass between them and the mesh of the pipeline.

Letters: S ranks. A rank's mesh has the axes of the pipeline's, of which ``stage`` has one entry. So
parts of the model find every axis that they name, and all ranks have one abstract mesh: what is
alike is traced and lowered once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from collectives.compat import varying_in
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree
from pipeline.core.options.plan import Plan


class RankMeshes:
    """The meshes of a pipeline's ranks.

    Args:
      plan: the options of the pipeline.

    Attributes:
      ranks: [S] meshes.
      abstract: the abstract mesh of each.
    """

    def __init__(self, plan: Plan) -> None:
        self._mesh, self._tracks = plan.mesh, plan.tracks_varying
        names = plan.mesh.axis_names
        self._manual = tuple(axis for axis in names if axis in plan.axes.manual)
        rows = range(plan.mesh.shape[STAGE])
        of = [plan.mesh.devices.take([rank], names.index(STAGE)) for rank in rows]
        self.ranks = [Mesh(devices, names) for devices in of]
        self.abstract: AbstractMesh = self.ranks[0].abstract_mesh

    def devices(self, rank: int) -> tuple[Any, ...]:
        """The devices of a rank, in the order of its mesh."""
        return tuple(self.ranks[rank].devices.flat)

    # --- state and batch: arrays of the pipeline's mesh ---

    def placed(self, leaves: Leaves, specs: Sequence[P]) -> Leaves:
        """Arrays on the pipeline's mesh; an array that already has its spec there is not copied."""

        def place(leaf: Any, spec: P) -> Any:
            sharding = NamedSharding(self._mesh, spec)
            is_array = isinstance(leaf, jax.Array)
            is_there = is_array and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            return leaf if is_there else jax.device_put(leaf, sharding)

        return [place(*pair) for pair in zip(leaves, specs, strict=True)]

    def split(self, leaves: Leaves, specs: Sequence[P]) -> list[Leaves]:
        """[S] the parts of `placed` arrays that each rank has, without a copy."""
        columns = [self._split(*pair) for pair in zip(leaves, specs, strict=True)]
        return [[column[rank] for column in columns] for rank in range(len(self.ranks))]

    def _split(self, leaf: jax.Array, spec: P) -> list[jax.Array]:
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = self.part_shape(leaf.shape, spec)
        return [
            jax.make_array_from_single_device_arrays(
                shape, NamedSharding(mesh, spec), [shard_on[d] for d in mesh.devices.flat]
            )
            for mesh in self.ranks
        ]

    def part_shape(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        """The shape of a rank's part of an array."""
        named = [STAGE in axes_in(entry) for entry in spec]
        named += [False] * (len(shape) - len(named))
        size = len(self.ranks)
        return tuple(n // size if has else n for n, has in zip(shape, named, strict=True))

    def types(self, tree: Tree, specs: Tree) -> Tree:
        """The types of a rank's part of a tree, on the abstract mesh."""
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
        shaped = [(self.part_shape(x.shape, spec), x.dtype, spec) for x, spec in pairs]
        return jax.tree.unflatten(treedef, [typed(self.abstract, *one) for one in shaped])

    def replicate(self, rank: int, tree: Tree) -> Tree:
        """A tree of arrays or numbers, whole on every device of a rank."""
        return jax.device_put(tree, NamedSharding(self.ranks[rank], P()))

    # --- values between actions: each device has its own ---

    def value_specs(self, types: Tree) -> Tree:
        """The specs of values that pass between programs.

        Each device has a value of its own. So a value crosses the border of a jitted function as an
        array with a leading axis, which is split over the mesh axes over which the value varies.

        Args:
          types: of the values within a program.
        """
        return jax.tree.map(self._value_spec, types)

    def _value_spec(self, t: Any) -> P:
        varying = varying_in(t) if self._tracks else self._manual
        return P(tuple(axis for axis in self._manual if axis in varying))

    def value_types(self, types: Tree, *, joined: bool = False) -> Tree:
        """The types of these values on the abstract mesh, or as `join` makes them of all ranks."""
        mesh = self._mesh if joined else self.abstract

        def value_type(t: Any) -> jax.ShapeDtypeStruct:
            spec = self._value_spec(t)
            lead = math.prod(mesh.shape[axis] for axis in axes_in(spec[0]))
            return typed(mesh, (lead, *t.shape), t.dtype, spec)

        return jax.tree.map(value_type, types)

    def value_shardings(self, rank: int, types: Tree) -> Tree:
        """The shardings of these values on the devices of a rank."""
        specs = self.value_specs(types)
        return jax.tree.map(lambda spec: NamedSharding(self.ranks[rank], spec), specs)

    def join(self, trees: Sequence[Tree]) -> Tree:
        """The values of all ranks as one tree of arrays on the pipeline's mesh.

        Args:
          trees: [S] of each rank, of one structure and of the same types.
        """

        def joined(*leaves: jax.Array) -> jax.Array:
            spec = cast("NamedSharding", leaves[0].sharding).spec
            lead, *rest = leaves[0].shape
            count = len(leaves) if STAGE in axes_in(spec[0]) else 1
            sharding = NamedSharding(self._mesh, spec)
            shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
            shape = (lead * count, *rest)
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return jax.tree.map(joined, *trees)


def typed(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], dtype: Any, spec: P
) -> jax.ShapeDtypeStruct:
    """The type of an array on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def drop_device_axis(tree: Tree) -> Tree:
    """Values without the leading axis with which they enter a program."""
    return jax.tree.map(lambda x: x[0], tree)


def add_device_axis(tree: Tree) -> Tree:
    """Values with the leading axis with which they leave a program."""
    return jax.tree.map(lambda x: x[None], tree)
