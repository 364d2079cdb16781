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
from pipeline.base.tree import Leaves, Tree
from pipeline.core.programs.meshes import RankMeshes, from_shards, shards_of, typed

# Sends a value; returns it on the target's devices. Both are None in a process that holds no device
# of that rank.
Message = Callable[[Tree | None], Tree | None]


def lower_message(
    meshes: RankMeshes, source: int, target: int, types: Tree
) -> Callable[[], Message]:
    """A message, to be compiled.

    Args:
      meshes: of the ranks.
      source: the rank that sends.
      target: the rank that receives.
      types: of the value, within a program.
    """
    ends = zip(meshes.devices(source), meshes.devices(target), strict=True)
    if any(process_of(a) != process_of(b) for a, b in ends):
        return Exchange(meshes, source, target, types).compile
    copy = Copy(meshes, source, target, types)
    return lambda: copy


class Copy:
    """A message between devices of the same processes; arguments as `lower_message`'s."""

    def __init__(self, meshes: RankMeshes, source: int, target: int, types: Tree) -> None:
        self._shardings = meshes.value_shardings(target, types)
        pairs = zip(meshes.devices(source), meshes.devices(target), strict=True)
        self._target_of = dict(pairs)
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
