"""Transfers of arrays, shard by shard, from the devices of one mesh to another mesh.

Within a process `jax.device_put` does this. Between processes a message is a collective over the
devices of both meshes, and all their processes must call these collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.places.sizes import STAGE

Tree = Any  # a pytree of arrays


def shards_of(x: jax.Array) -> dict[Any, jax.Array]:
    """Return the shards of an array that this process holds, by device."""
    # If a process has one device, and `jax.device_put` made the array from a jax.Array of several
    # processes, the array has no `addressable_shards` (jax 0.10.2).
    if len(x.sharding.addressable_devices) == 1:
        return dict.fromkeys(x.sharding.addressable_devices, x.addressable_data(0))
    return {shard.device: shard.data for shard in x.addressable_shards}


def from_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[Any, jax.Array]
) -> jax.Array:
    """Make an array from the shards that this process holds, by device."""
    local_shards = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, local_shards)


def typed(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], dtype: Any, spec: P
) -> jax.ShapeDtypeStruct:
    """Return the type of an array on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def waits(mesh: Mesh) -> bool:
    """Tell whether a call of a collective over a mesh has to wait until the collective has ended.

    On CPUs of several processes it has to. XLA's CPU client has max(cores, devices) threads. A
    collective holds one until all processes take part in it. The launch of a program on several
    devices of a process holds them too, while a device has 32 programs in flight. If the collective
    for which another process waits finds no thread, all processes wait for ever. If each call waits
    instead, in the order that all processes share, all programs in flight end by themselves.
    """
    return mesh.devices.flat[0].platform == "cpu" and bool(mesh.is_multi_process)


class Exchange:
    """A message between meshes of several processes, by one ppermute.

    Each device of both meshes takes part: a device of the source with its value, a device of the
    target with zeros, which are not received.

    Args:
      source: the mesh that sends, with one entry on ``stage``.
      target: the mesh that receives, of the same shape.
      types: the types of the value on each device, a tree.
      received: the types of the arrays on ``target``, with a leading axis over devices.
    """

    def __init__(self, source: Mesh, target: Mesh, types: Tree, received: Tree) -> None:
        names = source.axis_names
        devices = [source.devices, target.devices]
        both = Mesh(np.concatenate(devices, names.index(STAGE)), names)
        leaves, self._tree = jax.tree.flatten(types)
        spec = P(names)
        self._sent = [typed(both, (both.size, *t.shape), t.dtype, spec) for t in leaves]
        self._received = jax.tree.leaves(received)
        here = target.local_devices
        self._receives = bool(here)
        self._waits = waits(both)
        # The zeros that the target sends: the bytes of one message, kept for all calls.
        self._zeros = [
            {device: jnp.zeros((1, *t.shape), t.dtype, device=device) for device in here}
            for t in leaves
        ]

        def exchange(values: list[jax.Array]) -> list[jax.Array]:
            return [jax.lax.ppermute(x, STAGE, [(0, 1)]) for x in values]

        run = jax.shard_map(exchange, mesh=both, in_specs=spec, out_specs=spec)
        self._run: Any = jax.jit(run).lower(self._sent)

    def compile(self) -> Exchange:
        """Compile the collective; return this message."""
        self._run = self._run.compile()
        return self

    def __call__(self, value: Tree | None) -> Tree | None:
        """Send a value; return it on the target's devices. On CPUs, wait until it is there.

        A process without devices of the source passes None; a process without devices of the target
        gets None.
        """
        held = [{}] * len(self._sent) if value is None else map(shards_of, jax.tree.leaves(value))
        shards = [zeros | mine for zeros, mine in zip(self._zeros, held, strict=True)]
        results = self._run(list(map(self._array, self._sent, shards)))
        if self._waits:
            jax.block_until_ready(results)
        if not self._receives:
            return None
        received = map(self._array, self._received, map(shards_of, results))
        return jax.tree.unflatten(self._tree, list(received))

    @staticmethod
    def _array(t: jax.ShapeDtypeStruct, shards: Mapping[Any, jax.Array]) -> jax.Array:
        return from_shards(t.shape, cast("NamedSharding", t.sharding), shards)
