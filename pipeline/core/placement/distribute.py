"""Distribution of arrays that every process has whole over the devices of all processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from collectives.everywhere import part_of


def distribute(x: Any, sharding: Sharding, *, compare: bool = True) -> jax.Array:
    """Place an array by ``sharding``; each process provides the parts of its own devices.

    Args:
      x: an array or a typed key; with several processes, equal on each.
      sharding: a sharding whose spec has at most as many entries as ``x`` has dims.
      compare: whether to check that the array is equal on all processes, if it is replicated.
    """
    if isinstance(x, jax.core.Tracer):
        return constrained(x, sharding)
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = distribute(jax.random.key_data(x), sharding, compare=compare)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_replicated and compare:
        return jax.device_put(x, sharding)  # compares the processes' values
    read = np.asarray(x).__getitem__
    # `dtype` is for a process without a device of the sharding: it reads no part of the array.
    return jax.make_array_from_callback(x.shape, sharding, read, dtype=x.dtype)


def with_sharding(x: Any, sharding: NamedSharding, *, compare: bool = True) -> Any:
    """Place an array with a sharding; of a type, return the type with this sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return distribute(x, sharding, compare=compare)


def placed_on(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Place an array with a sharding; no copy if it has that sharding."""
    if not isinstance(leaf, jax.Array):
        return distribute(leaf, sharding, compare=False)
    if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    # Numbers that all processes have, on ranks with meshes of their own.
    is_whole = not leaf.is_fully_addressable and leaf.sharding.is_fully_replicated
    if is_whole and leaf.sharding.device_set > sharding.device_set:
        return part_of(leaf, sharding)
    return distribute(leaf, sharding, compare=False)


def constrained(x: Any, sharding: Any) -> Any:
    """Constrain a traced array to a sharding; over Explicit axes of its mesh, change its type."""
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return jax.lax.with_sharding_constraint(x, sharding)
    explicit = set(sharding.mesh.explicit_axes)

    def explicit_axes(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in explicit) or None

    spec = PartitionSpec(*map(explicit_axes, sharding.spec))
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
