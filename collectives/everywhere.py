"""Arrays of one mesh made known to the devices of all processes.

Some processes may have no device of the array's mesh, so a sum over all devices carries the array:
each part is added by one device, and all other devices add zeros. All processes call these
functions in the same order; a process without a part of an array passes
`collectives.transfer.elsewhere` of its type.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.places.homes import processes_of
from collectives.transfer import from_shards, shards_of, typed, waits

_AXES = "part", "copy"


def everywhere(devices: Iterable[Any]) -> NamedSharding:
    """Return the sharding of arrays that all devices have whole; their order does not matter."""
    return _sharding(devices, parts=1)


def spread_sharding(shape: tuple[int, ...], devices: Sequence[Any]) -> NamedSharding:
    """Return a sharding over all devices that divides an array as far as one of its dims allows."""
    sizes = [math.gcd(size, len(devices)) for size in shape]
    parts = max(sizes, default=1)
    return _sharding(devices, parts=parts, dim=sizes.index(parts) if sizes else 0)


def _sharding(devices: Iterable[Any], *, parts: int, dim: int = 0) -> NamedSharding:
    ordered = np.array(sorted(devices, key=lambda device: device.id))
    mesh = Mesh(ordered.reshape(parts, -1), _AXES)
    return NamedSharding(mesh, P(*(None,) * dim, "part") if parts > 1 else P())


def send_numbers(
    values: Sequence[jax.Array], shardings: Sequence[NamedSharding], devices: tuple[Any, ...]
) -> list[jax.Array]:
    """Copy arrays from their meshes to others; between processes by one sum.

    Between processes each device then has all of them for a moment, so they should be small.
    ``devices`` are those of all meshes, in one order in all processes. An object that is given
    several times is sent once.
    """
    if len(processes_of(devices)) <= 1:
        return jax.device_put(list(values), list(shardings))
    if not values:
        return []
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in values]
    if any(is_key):  # keys cannot be added: their integers are sent
        pairs = list(zip(values, is_key, strict=True))
        numbers = [jax.random.key_data(x) if yes else x for x, yes in pairs]
        sent = zip(send_numbers(numbers, shardings, devices), pairs, strict=True)
        wrap = jax.random.wrap_key_data
        return [wrap(x, impl=jax.random.key_impl(like)) if yes else x for x, (like, yes) in sent]
    distinct = {id(x): x for x in values}
    types = tuple(_type_of(x) for x in distinct.values())
    run, parts = _sum_of_numbers(types, devices)
    sums = run([of.array(x) for of, x in zip(parts, distinct.values(), strict=True)])
    whole = dict(zip(distinct, _waited(sums), strict=True))
    return [part_of(whole[id(x)], to) for x, to in zip(values, shardings, strict=True)]


def spread(x: jax.Array, devices: tuple[Any, ...]) -> jax.Array:
    """Divide an array by `spread_sharding`; meanwhile each device has the whole array."""
    run, parts = _sum_of_array(_type_of(x), devices)
    result: jax.Array = _waited(run(parts.array(x)))
    return result


def gather_spread(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Undo `spread`: return the array with a sharding over some of its devices."""
    mesh: Any = cast("NamedSharding", x.sharding).mesh
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x)
    return part_of(_waited(whole), sharding)


def part_of(whole: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Cut an array to the parts of a sharding, whose devices all have the whole array."""
    held, indices = shards_of(whole), sharding.addressable_devices_indices_map(whole.shape)
    shards = {device: held[device][index] for device, index in indices.items()}
    return from_shards(whole.shape, sharding, shards, whole.dtype)


class _Parts:
    """The parts of an array, each on the device that adds it to the sum over all devices.

    The bits are added as integers, so every number stays as it is, -0 and NaN too.

    Attributes:
      given: the type of all devices' parts; those of devices that add none are zeros.
    """

    def __init__(self, t: jax.ShapeDtypeStruct, mesh: Mesh) -> None:
        self._type, sharding = t, cast("NamedSharding", t.sharding)
        shape = sharding.shard_shape(t.shape)
        self.given = typed(mesh, (mesh.size, *shape), t.dtype, P(_AXES))
        self._shape, self._devices = shape, mesh.local_devices
        self._is_bool = jnp.issubdtype(t.dtype, jnp.bool_)
        self._bits = jnp.dtype(f"uint{8 * t.dtype.itemsize}")
        number_of = {device: n for n, device in enumerate(mesh.devices.flat)}
        self._starts = np.zeros((mesh.size, len(shape)), np.int32)
        self._adds = np.zeros(mesh.size, bool)
        indices = sharding.devices_indices_map(t.shape)
        for device in {str(index): device for device, index in indices.items()}.values():
            self._starts[number_of[device]] = [of.start or 0 for of in indices[device]]
            self._adds[number_of[device]] = True

    def array(self, x: jax.Array) -> jax.Array:
        shards = {device: shard[None] for device, shard in shards_of(x).items()}
        for device in self._devices:
            if device not in shards:
                shards[device] = jnp.zeros((1, *self._shape), self._type.dtype, device=device)
        return from_shards(self.given.shape, cast("NamedSharding", self.given.sharding), shards)

    def term(self, x: jax.Array) -> jax.Array:
        """Return the bits that this device adds to the whole array, within a shard_map."""
        me, zeros = jax.lax.axis_index(_AXES), jnp.zeros(self._type.shape, self._bits)
        bits = x[0].astype(self._bits) if self._is_bool else _as(x[0], self._bits)
        term = jax.lax.dynamic_update_slice(zeros, bits, tuple(jnp.asarray(self._starts)[me]))
        return jnp.where(jnp.asarray(self._adds)[me], term, zeros)

    def numbers(self, bits: jax.Array) -> jax.Array:
        return bits.astype(bool) if self._is_bool else _as(bits, self._type.dtype)


@functools.lru_cache(256)
def _sum_of_numbers(types: tuple[jax.ShapeDtypeStruct, ...], devices: tuple[Any, ...]) -> Any:
    mesh = everywhere(devices).mesh
    parts = [_Parts(t, cast("Mesh", mesh)) for t in types]

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        # One sum: of several, devices with few threads may begin different ones and wait.
        terms = [of.term(x) for of, x in zip(parts, arrays, strict=True)]
        flat = [_as(term, jnp.uint8).ravel() for term in terms]
        ends = np.cumsum([len(x) for x in flat])[:-1]
        sums = jnp.split(jax.lax.psum(jnp.concatenate(flat), _AXES), ends)
        return [
            of.numbers(_as_like(x, term)) for of, x, term in zip(parts, sums, terms, strict=True)
        ]

    return _compiled(run, mesh, [of.given for of in parts], P()), parts


@functools.lru_cache(256)
def _sum_of_array(t: jax.ShapeDtypeStruct, devices: tuple[Any, ...]) -> Any:
    out = spread_sharding(t.shape, devices)
    parts, spec = _Parts(t, cast("Mesh", out.mesh)), out.spec

    def run(x: jax.Array) -> jax.Array:
        term = parts.term(x)
        if not spec:
            return parts.numbers(jax.lax.psum(term, _AXES))
        scatter = functools.partial(jax.lax.psum_scatter, scatter_dimension=len(spec) - 1)
        return parts.numbers(jax.lax.psum(scatter(term, "part", tiled=True), "copy"))

    return _compiled(run, out.mesh, parts.given, spec), parts


def _compiled(run: Any, mesh: Any, given: Any, spec: P) -> Any:
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(_AXES), out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(given).compile()


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def _as_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return the integers of ``like`` whose bytes are ``x``."""
    size = like.dtype.itemsize
    return _as(x.reshape(*like.shape, size) if size > 1 else x.reshape(like.shape), like.dtype)


def _type_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _waited(results: Any) -> Any:
    mesh: Any = jax.tree.leaves(results)[0].sharding.mesh
    return jax.block_until_ready(results) if waits(mesh) else results
