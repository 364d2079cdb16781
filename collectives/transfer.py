"""Transfers of arrays, shard by shard, from the devices of one mesh to another mesh.

Within a process `jax.device_put` does this. Between processes a message is a collective over the
devices of both meshes, and all their processes must call these collectives in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.compat import key_impl
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
    shape: tuple[int, ...],
    sharding: NamedSharding,
    shards: Mapping[Any, jax.Array],
    dtype: Any = None,
) -> jax.Array:
    """Make an array from the shards that this process holds, by device.

    ``dtype`` is needed if this process holds none.
    """
    local_shards = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    make = jax.make_array_from_single_device_arrays
    return make(shape, sharding, local_shards, dtype=dtype)


def is_elsewhere(x: Any) -> bool:
    """Tell whether all devices of an array belong to other processes."""
    return isinstance(x, jax.Array) and not x.sharding.addressable_devices


def elsewhere(t: Any) -> jax.Array:
    """Make the array of a type whose devices all belong to other processes."""
    if not jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
        return from_shards(t.shape, t.sharding, {}, t.dtype)
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(t.shape, t.dtype))
    data = from_shards(numbers.shape, t.sharding, {}, numbers.dtype)
    keys: jax.Array = jax.random.wrap_key_data(data, impl=key_impl(t.dtype))
    return keys


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
    """A message between meshes of several processes.

    Devices that hold equal parts of the value form a group, on each mesh. If the groups of a part
    have equal sizes, each device of one sends its copy to one device of the other. If they differ,
    the receivers get pieces, so that each byte is sent once, and then join them (all-gather).

    Args:
      sent: the types of the arrays on the mesh that sends, a tree.
      received: their types on the mesh that receives, with equal shapes and specs.
    """

    def __init__(self, sent: Tree, received: Tree) -> None:
        self._sent, self._tree = jax.tree.flatten(sent)
        self._received = jax.tree.leaves(received)
        source, target = (of[0].sharding.mesh for of in (self._sent, self._received))
        names, devices = source.axis_names, [source.devices, target.devices]
        if source.devices.shape == target.devices.shape:
            both = Mesh(np.concatenate(devices, names.index(STAGE)), names)
        else:
            both = Mesh(np.concatenate([of.ravel() for of in devices]), ("device",))
        self._receives = bool(target.local_devices)
        self._waits = waits(both)
        self._routes = [
            _Route(*pair, both) for pair in zip(self._sent, self._received, strict=True)
        ]
        spec = P(both.axis_names)

        def exchange(values: list[jax.Array]) -> list[jax.Array]:
            return [route.send(x) for route, x in zip(self._routes, values, strict=True)]

        run = jax.shard_map(exchange, mesh=both, in_specs=spec, out_specs=spec)
        self._run: Any = jax.jit(run).lower([route.given for route in self._routes])
        # The zeros that the target sends: the bytes of one message, kept for all calls.
        self._zeros = [
            {
                device: jnp.zeros(route.shard, t.dtype, device=device)
                for device in target.local_devices
            }
            for route, t in zip(self._routes, self._sent, strict=True)
        ]

    def compile(self) -> Exchange:
        """Compile the collective; return this message."""
        self._run = self._run.compile()
        for route in self._routes if self._receives else ():
            route.compile()
        return self

    def __call__(self, value: Tree | None) -> Tree | None:
        """Send a value; return it on the target's devices. On CPUs, wait until it is there.

        A process without devices of the source passes None; a process without devices of the target
        gets None.
        """
        held = [{}] * len(self._sent) if value is None else map(shards_of, jax.tree.leaves(value))
        shards = [zeros | mine for zeros, mine in zip(self._zeros, held, strict=True)]
        given = (route.given for route in self._routes)
        results = self._run(list(map(_array, given, shards)))
        if self._waits:
            jax.block_until_ready(results)
        if not self._receives:
            return None
        # An array without entries has no sharding in the results.
        parts = zip(self._routes, map(shards_of, results), self._zeros, strict=True)
        joined = [of.join(zeros if 0 in of.shard else shards) for of, shards, zeros in parts]
        return jax.tree.unflatten(self._tree, joined)


class _Route:
    """How one array of an `Exchange` passes from devices to devices.

    Args:
      sent, received: the array's types on both meshes.
      both: the mesh of all devices, those of ``sent`` first.

    Attributes:
      shard: the shape of a device's part.
      given: the type of the array of all devices' parts.
    """

    def __init__(
        self, sent: jax.ShapeDtypeStruct, received: jax.ShapeDtypeStruct, both: Mesh
    ) -> None:
        self._received, self._both = received, both
        self.shard = cast("NamedSharding", sent.sharding).shard_shape(sent.shape)
        lead, *rest = self.shard
        self.given = typed(both, (both.size * lead, *rest), sent.dtype, P(both.axis_names))
        sources, targets = _groups(sent), _groups(received)
        place = {device: n for n, device in enumerate(both.devices.flat)}
        part, group = next(iter(sources.items()))
        senders, receivers = len(group), len(targets[part])  # equal for all parts
        self._pieces = 1 if senders == receivers or 0 in self.shard else receivers
        # In a round each device sends to at most one other: the pairs, the piece of each device,
        # and whether it receives.
        self._rounds: list[tuple[list[tuple[int, int]], list[int], list[bool]]] = []
        for first in range(0, receivers, senders):
            pairs, piece_of = [], [0] * both.size
            for part, group in sources.items():
                for n, (a, b) in enumerate(zip(group, targets[part][first:], strict=False), first):
                    pairs.append((place[a], place[b]))
                    piece_of[place[a]] = n % self._pieces
            reached = {b for _, b in pairs}
            self._rounds.append((pairs, piece_of, [n in reached for n in range(both.size)]))

    def send(self, x: jax.Array) -> jax.Array:
        """Send this device's part or its pieces, within the shard_map over all devices."""
        axes = self._both.axis_names
        if self._pieces == 1:
            return jax.lax.ppermute(x, axes, self._rounds[0][0])
        size = -(-x.size // self._pieces)
        pieces = jnp.pad(x.ravel(), (0, size * self._pieces - x.size)).reshape(-1, 1, size)
        received, me = jnp.zeros_like(pieces[0]), jax.lax.axis_index(axes)
        for pairs, piece_of, receives in self._rounds:
            arrived = jax.lax.ppermute(pieces[jnp.asarray(piece_of)[me]], axes, pairs)
            received = jnp.where(jnp.asarray(receives)[me], arrived, received)
        return received

    def compile(self) -> None:
        """Compile the join of pieces on the receiving mesh, if there are pieces."""
        if self._pieces == 1:
            return
        t, sharding = self._received, cast("NamedSharding", self._received.sharding)
        lead, size = sharding.spec[0], math.prod(self.shard)
        axes = (lead,) if isinstance(lead, str) else tuple(lead or ())
        axes += tuple(name for name in sharding.mesh.axis_names if name not in axes)
        parts = t.shape[0] // self.shard[0]
        shape = parts * self._pieces, -(-size // self._pieces)
        self._apart = typed(sharding.mesh, shape, t.dtype, P(axes))

        def join(x: jax.Array) -> jax.Array:
            return x.reshape(parts, -1)[:, :size].reshape(t.shape)

        self._join = jax.jit(join, out_shardings=sharding).lower(self._apart).compile()

    def join(self, shards: Mapping[Any, jax.Array]) -> jax.Array:
        if self._pieces == 1:
            return _array(self._received, shards)
        joined: jax.Array = self._join(_array(self._apart, shards))
        mesh: Any = cast("NamedSharding", self._received.sharding).mesh
        return jax.block_until_ready(joined) if waits(mesh) else joined


def _groups(t: jax.ShapeDtypeStruct) -> dict[tuple[Any, ...], list[Any]]:
    """Group the devices that hold an array by their part of it, in the mesh's order."""
    sharding = cast("NamedSharding", t.sharding)
    parts = sharding.devices_indices_map(t.shape)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for device in sharding.mesh.devices.flat:
        groups.setdefault(tuple(map(str, parts[device])), []).append(device)
    return groups


def _array(t: jax.ShapeDtypeStruct, shards: Mapping[Any, jax.Array]) -> jax.Array:
    return from_shards(t.shape, cast("NamedSharding", t.sharding), shards)
