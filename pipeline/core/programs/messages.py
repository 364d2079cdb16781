"""Messages from rank to rank.

Between devices of one process, a message is a copy, which this process starts without the others. A
message between processes is a collective of the devices of both ranks. All processes call their
collectives in one order (`collectives.transfer.Exchange`, `schedules.lowering.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from collectives.places.homes import process_of, processes_of
from collectives.transfer import Exchange, from_shards, shards_of
from pipeline.base.tree import Tree
from pipeline.core.placement.stage_meshes import check_parts_agree
from pipeline.core.programs.meshes import RankMeshes
from pipeline.core.programs.traced import Traced

# A function that sends a value, and returns it on the target's devices. In a process without a
# device of the source its argument is None; without a device of the target its result is None.
Message = Callable[[Tree | None], Tree | None]


def lower_message(
    ranks: Sequence[Traced], source: int, target: int, name: tuple[str, int, int]
) -> Callable[[], Message]:
    """Lower a message; return a function that compiles the message.

    Args:
      ranks: [S] the model of each rank.
      name: the kind of the value ("operand" or "gradient"), the stage that reads it, the slice.

    Raises:
      ValueError: the ranks' meshes differ, and their devices have different parts of the value.
    """
    of_source, of_target, (kind, stage, part) = ranks[source], ranks[target], name
    meshes, types = of_target.operands.meshes, of_target.stages[stage][part].types_of(kind)
    ends = meshes.devices(source), meshes.devices(target)
    value = of_source.stages[stage][part].types_of(kind)
    on_source = of_source.operands.meshes.value_types(value, meshes.ranks[source])
    on_target = meshes.value_types(types, meshes.ranks[target])
    if of_source is not of_target:
        check_parts_agree(on_source, on_target, kind, stage)
        is_copy = len(processes_of(ends[0] + ends[1])) == 1
    else:
        is_copy = all(process_of(a) == process_of(b) for a, b in zip(*ends, strict=True))
    if not is_copy:
        return Exchange(on_source, on_target).compile
    copy = Copy(meshes, source, target, types)
    return lambda: copy


class Copy:
    """A message between devices of one process; `lower_message` explains the arguments."""

    def __init__(self, meshes: RankMeshes, source: int, target: int, types: Tree) -> None:
        self._shardings = meshes.value_shardings(target, types)
        self._is_addressable = all(s.is_fully_addressable for s in jax.tree.leaves(self._shardings))
        if not self._is_addressable:
            pairs = zip(meshes.devices(source), meshes.devices(target), strict=True)
            self._target_of = dict(pairs)

    def __call__(self, value: Tree | None) -> Tree | None:
        if self._is_addressable:
            return jax.device_put(value, self._shardings)
        return jax.tree.map(self._copied, value, self._shardings)

    def _copied(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Copy each shard of this process to the corresponding device of the target rank."""
        to = {self._target_of[device]: shard for device, shard in shards_of(x).items()}
        moved = {device: jax.device_put(shard, device) for device, shard in to.items()}
        return from_shards(x.shape, sharding, moved)


def move(value: Tree, memory_kind: str | None) -> Tree:
    """Copy a value to another memory of the same devices; None is their own memory."""

    def moved(x: jax.Array) -> jax.Array:
        held: Any = x.sharding
        sharding = NamedSharding(held.mesh, held.spec, memory_kind=memory_kind)
        if x.is_fully_addressable:
            return jax.device_put(x, sharding)
        shards = {
            device: jax.device_put(shard, SingleDeviceSharding(device, memory_kind=memory_kind))
            for device, shard in shards_of(x).items()
        }
        return from_shards(x.shape, sharding, shards)

    return jax.tree.map(moved, value)
