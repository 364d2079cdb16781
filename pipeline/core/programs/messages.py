"""Messages from rank to rank.

Between devices of one process a message is a copy, which that process starts alone. A message
between processes is a collective of the devices of both ranks, which all their processes call in
one order (`schedules.clocks.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from collectives.places.homes import process_of
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree
from pipeline.core.programs.meshes import RankMeshes, from_shards, shards_of, typed
from pipeline.core.programs.program import RankModel

# Sends a value; returns it on the target's devices. Both are None in a process that holds no device
# of that rank.
Message = Callable[[Tree | None], Tree | None]


def lower_message(
    of_source: RankModel, of_target: RankModel, source: int, target: int, kind: str, stage: int
) -> Callable[[], Message]:
    """A message, to be compiled.

    Args:
      of_source: the model of the rank that sends.
      of_target: the model of the rank that receives.
      source: the rank that sends.
      target: the rank that receives.
      kind: of the value.
      stage: the stage that reads it.

    Raises:
      ValueError: the ranks' meshes are unlike, and the devices of one have other parts of it.
    """
    types = getattr(of_target.traced.stages[stage], kind)
    meshes = of_target.operands.meshes
    if of_source is not of_target:
        sent = getattr(of_source.traced.stages[stage], kind)
        of_sent = of_source.operands.meshes.value_types(sent)
        _check_alike(of_sent, meshes.value_types(types), kind, stage)
        copy = Copy(meshes, source, target, types)
        return lambda: copy
    ends = zip(meshes.devices(source), meshes.devices(target), strict=True)
    if any(process_of(a) != process_of(b) for a, b in ends):
        return Exchange(meshes, source, target, types).compile
    copy = Copy(meshes, source, target, types)
    return lambda: copy


def _check_alike(sent: Tree, received: Tree, kind: str, stage: int) -> None:
    """Check that both ranks of a message have the same parts of it."""
    for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(received), strict=True):
        if (a.shape, a.sharding.spec) != (b.shape, b.sharding.spec):
            axes = axes_in(a.sharding.spec[0])
            ends = ("input", stage) if kind == "operand" else ("output", stage)
            raise ValueError(
                f"the {ends[0]} of stages[{ends[1]}] has a part for each device along "
                f"{' x '.join(map(repr, axes))}, {a.shape[0]} on one side of the message and "
                f"{b.shape[0]} on the other, whose stage_meshes differ: let the stage join its "
                f"parts before it returns (jax.lax.all_gather), or give both ranks meshes of one "
                f"shape"
            )


class Copy:
    """A message between devices of the same processes; arguments as `lower_message`'s."""

    def __init__(self, meshes: RankMeshes, source: int, target: int, types: Tree) -> None:
        self._shardings = meshes.value_shardings(target, types)
        self._target_of = dict(zip(meshes.devices(source), meshes.devices(target)))  # noqa: B905
        self._is_addressable = all(s.is_fully_addressable for s in jax.tree.leaves(self._shardings))

    def __call__(self, value: Tree | None) -> Tree | None:
        """As in `Message`."""
        if self._is_addressable:
            return jax.device_put(value, self._shardings)
        return jax.tree.map(self._copied, value, self._shardings)

    def _copied(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """The shards of this process, each on the other rank's device."""
        to = {self._target_of[device]: shard for device, shard in shards_of(x).items()}
        moved = {device: jax.device_put(shard, device) for device, shard in to.items()}
        return from_shards(x.shape, sharding, moved)


class Exchange:
    """A message between processes, by one ppermute; arguments as `lower_message`'s.

    Each device of both ranks takes part: one of the source with its value, one of the target with
    zeros, which nobody receives.
    """

    def __init__(self, meshes: RankMeshes, source: int, target: int, types: Tree) -> None:
        mesh = meshes.pair(source, target)
        leaves, self._tree = jax.tree.flatten(types)
        spec = P(mesh.axis_names)
        self._sent = [typed(mesh, (mesh.size, *t.shape), t.dtype, spec) for t in leaves]
        self._received = [
            typed(meshes.ranks[target], t.shape, t.dtype, t.sharding.spec)
            for t in jax.tree.leaves(meshes.value_types(types))
        ]
        here = meshes.ranks[target].local_devices
        self._receives = bool(here)
        # What the target sends: one message's bytes, kept for all calls.
        self._zeros = [
            {device: jnp.zeros((1, *t.shape), t.dtype, device=device) for device in here}
            for t in leaves
        ]

        def exchange(values: Leaves) -> Leaves:
            return [jax.lax.ppermute(x, STAGE, [(0, 1)]) for x in values]

        run = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec)
        self._lowered = jax.jit(run).lower(self._sent)
        self._run: Callable[[Leaves], Leaves]

    def compile(self) -> Exchange:
        """The message, which can be called."""
        self._run = self._lowered.compile()
        return self

    def __call__(self, value: Tree | None) -> Tree | None:
        """As in `Message`."""
        held = [{}] * len(self._sent) if value is None else map(shards_of, jax.tree.leaves(value))
        shards = [zeros | mine for zeros, mine in zip(self._zeros, held, strict=True)]
        results = self._run(list(map(self._array, self._sent, shards)))
        if not self._receives:
            return None
        received = map(self._array, self._received, map(shards_of, results))
        return jax.tree.unflatten(self._tree, list(received))

    @staticmethod
    def _array(t: jax.ShapeDtypeStruct, shards: Mapping[Any, jax.Array]) -> jax.Array:
        return from_shards(t.shape, cast("NamedSharding", t.sharding), shards)
