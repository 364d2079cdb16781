"""Losses: a mean, or a sum with its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.tree import partition, shape_text

LossFn = Callable[[Any, Any], Any]


def as_sum_and_weight(loss_fn: LossFn, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Call ``loss_fn`` on one microbatch; a scalar mean becomes a sum of weight 1.

    Raises:
      ValueError: it returned neither a float scalar nor a pair of scalars.
    """
    result = loss_fn(outputs, targets)
    pair = result if isinstance(result, (tuple, list)) else (result, jnp.ones(()))
    if len(pair) != 2 or any(jnp.shape(x) != () for x in pair) or not _is_float(pair[0]):
        given = jax.tree.map(lambda x: shape_text(jnp.asarray(x)), result)
        raise ValueError(
            f"loss_fn returned {given}; it returns a float scalar, the mean over the microbatch, "
            f"or a pair of scalars (sum, weight): reduce the loss, for example with .mean()"
        )
    total, weight = (jnp.asarray(x).astype(jnp.float32) for x in pair)
    return total, jax.lax.stop_gradient(weight)


def pairing(outputs: Any, cotangents: list[Any]) -> tuple[jax.Array, jax.Array]:
    """The loss whose gradient for the outputs' float leaves is ``cotangents``.

    This is how `pipe(inputs)` is differentiated by the same kernel. Its weight is 0, since its
    gradient must not be normalised.
    """
    floats, _ = partition(outputs)
    total = jnp.zeros(())
    for y, ct in zip(floats, cotangents, strict=True):
        total += jnp.sum(y.astype(jnp.float32) * ct.astype(jnp.float32))
    return total, jnp.zeros(())


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
