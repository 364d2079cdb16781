"""The meshes of ranks, and arrays that pass between them and the mesh of the pipeline.

Letters: S ranks. A rank's mesh has all axes of the pipeline's mesh; its axis ``stage`` has size 1.
So parts of the model find every axis that they name, and all ranks have one abstract mesh: equal
programs are traced and lowered once for all ranks. A process calls the programs of its *local*
ranks: the ranks of which it has a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from collectives.compat import varying_in
from collectives.transfer import from_shards, shards_of, typed
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree
from pipeline.core.options.plan import Plan
from pipeline.core.placement.distribute import distribute, placed_on


class RankMeshes:
    """The meshes of a pipeline's ranks.

    Attributes:
      local_ranks: the ranks of which this process has a device.
      abstract: the abstract mesh of each rank.
      sharding: a cached function from a rank and a spec to the sharding; from None and a spec, on
        the pipeline's mesh.
    """

    def __init__(self, plan: Plan) -> None:
        self._mesh, self._tracks = plan.mesh, plan.tracks_varying
        names = plan.mesh.axis_names
        self._manual = tuple(axis for axis in names if axis in plan.axes.manual)
        self.ranks = plan.rank_meshes
        like = plan.mesh if plan.stage_meshes else self.ranks[0]
        self.abstract: AbstractMesh = like.abstract_mesh
        self.local_ranks = [rank for rank, mesh in enumerate(self.ranks) if mesh.local_devices]
        # Cached, because JAX finds a sharding's devices once per object.
        meshes: dict[int | None, Mesh] = {None: plan.mesh, **dict(enumerate(self.ranks))}
        self.sharding = functools.cache(lambda rank, spec: NamedSharding(meshes[rank], spec))

    def devices(self, rank: int) -> tuple[Any, ...]:
        return tuple(self.ranks[rank].devices.flat)

    # --- state and batch: arrays of the pipeline's mesh ---

    def placed(self, leaves: Leaves, specs: Sequence[P]) -> Leaves:
        """Place arrays on the pipeline's mesh; an array that already has its spec is not copied."""
        pairs = zip(leaves, specs, strict=True)
        return [placed_on(leaf, NamedSharding(self._mesh, spec)) for leaf, spec in pairs]

    def split(self, leaves: Leaves, specs: Sequence[P]) -> dict[int, Leaves]:
        """Split `placed` arrays by rank of this process, without a copy."""
        columns = [self._split(*pair) for pair in zip(leaves, specs, strict=True)]
        return {rank: [column[rank] for column in columns] for rank in self.local_ranks}

    def _split(self, leaf: jax.Array, spec: P) -> dict[int, jax.Array]:
        shards = shards_of(leaf)
        # A program takes a shard as it is if its rank has one device: that saves 10 us.
        if self._mesh.size == len(self.ranks):
            return {rank: shards[self.ranks[rank].devices.flat[0]] for rank in self.local_ranks}
        shape = self.part_shape(leaf.shape, spec)
        return {
            rank: from_shards(shape, self.sharding(rank, spec), shards) for rank in self.local_ranks
        }

    def part_shape(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        named = [STAGE in axes_in(entry) for entry in spec]
        named += [False] * (len(shape) - len(named))
        size = self._mesh.shape[STAGE]
        return tuple(n // size if has else n for n, has in zip(shape, named, strict=True))

    def types(self, tree: Tree, specs: Tree) -> Tree:
        """Return the types of a rank's part of a tree, on the abstract mesh."""
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, jax.tree.leaves(specs), strict=True)
        shaped = [(self.part_shape(x.shape, spec), x.dtype, spec) for x, spec in pairs]
        return jax.tree.unflatten(treedef, [typed(self.abstract, *one) for one in shaped])

    def zeros(self, rank: int, types: Tree) -> Tree:
        """Make values of zeros on a rank's devices (`value_types`)."""

        def make(t: Any) -> jax.Array:
            zeros = np.zeros(t.shape, t.dtype)
            return distribute(zeros, self.sharding(rank, t.sharding.spec), compare=False)

        return jax.tree.map(make, self.value_types(types))

    def replicate(self, rank: int | None, numbers: Sequence[Any]) -> list[jax.Array]:
        """Copy numbers to every device of a rank, or with None of all ranks."""
        return [distribute(n, self.sharding(rank, P()), compare=False) for n in numbers]

    # --- values between actions: each device has its own ---

    def value_specs(self, types: Tree) -> Tree:
        """Return the specs of values that pass between programs.

        Each device has its own value. So a value enters and leaves a jitted function as an array
        with a leading axis, which is split over the mesh axes over which the value varies.
        """
        return jax.tree.map(self._value_spec, types)

    def _value_spec(self, t: Any) -> P:
        varying = varying_in(t) if self._tracks else self._manual
        return P(tuple(axis for axis in self._manual if axis in varying))

    def value_types(self, types: Tree, mesh: Mesh | None = None) -> Tree:
        """Return the types of these values on the abstract mesh, or joined on ``mesh`` (`join`)."""
        on = self.abstract if mesh is None else mesh

        def value_type(t: Any) -> jax.ShapeDtypeStruct:
            spec = self._value_spec(t)
            lead = math.prod(on.shape[axis] for axis in axes_in(spec[0]))
            return typed(on, (lead, *t.shape), t.dtype, spec)

        return jax.tree.map(value_type, types)

    def value_shardings(self, rank: int, types: Tree) -> Tree:
        return self.shardings(rank, self.value_specs(types))

    def shardings(self, rank: int, specs: Tree) -> Tree:
        return jax.tree.map(functools.partial(self.sharding, rank), specs)

    def join(self, trees: Iterable[Tree]) -> Tree:
        """Join the values of all ranks to one tree of arrays on the pipeline's mesh.

        Args:
          trees: the values of this process's ranks, with equal structure and types.
        """

        def joined(*leaves: jax.Array) -> jax.Array:
            spec = cast("NamedSharding", leaves[0].sharding).spec
            lead, *rest = leaves[0].shape
            count = len(self.ranks) if STAGE in axes_in(spec[0]) else 1
            sharding = NamedSharding(self._mesh, spec)
            shards = {device: x for leaf in leaves for device, x in shards_of(leaf).items()}
            return from_shards((lead * count, *rest), sharding, shards)

        return jax.tree.map(joined, *trees)

    def part_on(self, rank: int, tree: Tree) -> Tree:
        """Return a rank's part of a tree from `join`, without a copy."""

        def part(leaf: jax.Array) -> jax.Array:
            spec = cast("NamedSharding", leaf.sharding).spec
            shape = self.part_shape(leaf.shape, spec)
            return from_shards(shape, self.sharding(rank, spec), shards_of(leaf))

        return jax.tree.map(part, tree)


def drop_device_axis(tree: Tree) -> Tree:
    """Drop the leading axis that every array has between programs; it has one entry here."""
    return jax.tree.map(lambda x: x[0], tree)


def add_device_axis(tree: Tree) -> Tree:
    """Add the leading axis that every array has between programs, over which devices differ."""
    return jax.tree.map(lambda x: x[None], tree)
