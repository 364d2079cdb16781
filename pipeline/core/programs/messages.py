"""Messages from rank to rank.

Between devices of one process a message is a copy, which that process starts alone. A message
between processes is a collective of the devices of both ranks, which all their processes call in
one order (`collectives.transfer.Exchange`, `schedules.clocks.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding

from collectives.places.homes import process_of
from collectives.transfer import Exchange, from_shards, shards_of
from pipeline.base.tree import Tree
from pipeline.core.placement.stage_meshes import check_parts_agree
from pipeline.core.programs.meshes import RankMeshes
from pipeline.core.programs.traced import Traced

# Sends a value; returns it on the target's devices. Both are None in a process that holds no device
# of that rank.
Message = Callable[[Tree | None], Tree | None]


def lower_message(
    ranks: Sequence[Traced], source: int, target: int, kind: str, stage: int
) -> Callable[[], Message]:
    """A message, to be compiled.

    Args:
      ranks: [S] the model of each rank.
      source: the rank that sends.
      target: the rank that receives.
      kind: of the value.
      stage: the stage that reads it.

    Raises:
      ValueError: the ranks' meshes are unlike, and the devices of one have other parts of it.
    """
    of_source, of_target = ranks[source], ranks[target]
    meshes, types = of_target.operands.meshes, getattr(of_target.stages[stage], kind)
    ends = meshes.devices(source), meshes.devices(target)
    if of_source is not of_target:  # within one process
        sent = of_source.operands.meshes.value_types(getattr(of_source.stages[stage], kind))
        check_parts_agree(sent, meshes.value_types(types), kind, stage)
    elif any(process_of(a) != process_of(b) for a, b in zip(*ends, strict=True)):
        on_target = meshes.value_types(types, meshes.ranks[target])
        return Exchange(meshes.ranks[source], meshes.ranks[target], types, on_target).compile
    copy = Copy(meshes, source, target, types)
    return lambda: copy


class Copy:
    """A message between devices of the same processes; arguments as `lower_message`'s."""

    def __init__(self, meshes: RankMeshes, source: int, target: int, types: Tree) -> None:
        self._shardings = meshes.value_shardings(target, types)
        self._is_addressable = all(s.is_fully_addressable for s in jax.tree.leaves(self._shardings))
        if not self._is_addressable:
            pairs = zip(meshes.devices(source), meshes.devices(target), strict=True)
            self._target_of = dict(pairs)

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
