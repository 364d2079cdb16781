"""Arrays that every process has whole, laid over the devices of all of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def distribute(x: Any, sharding: Sharding) -> jax.Array:
    """The array as ``sharding`` says; each process gives what its own devices hold.

    Args:
      x: any array, a typed key too; with several processes, the same on each.
      sharding: whose specification names no axis behind those of ``x``.
    """
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = distribute(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding.is_fully_replicated:
        return jax.device_put(x, sharding)  # sees that all processes have the same
    return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)
