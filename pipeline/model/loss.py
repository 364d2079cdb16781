"""Losses: a mean, or a sum with its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.compat import varying_in
from pipeline.base.tree import partition, real, shape_text

LossFn = Callable[[Any, Any], Any]


class LossModule:
    """Says that the loss is a module: its state lies with embed and head, and is trained so."""


Loss = LossFn | LossModule


def as_sum_and_weight(loss_fn: LossFn, outputs: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Call ``loss_fn`` on one microbatch; a scalar mean becomes a sum of weight 1.

    Raises:
      ValueError: it returned neither a float scalar nor a pair of scalars.
    """
    result = loss_fn(outputs, targets)
    pair = result if isinstance(result, (tuple, list)) else (result, jnp.ones(()))
    if len(pair) != 2 or not all(map(_is_scalar, pair)) or not _is_float(pair[0]):
        raise ValueError(
            f"loss_fn returned {_describe(result)}; it returns a float scalar, the mean over the "
            f"microbatch, or a pair of scalars (sum, weight): reduce it, for example with .mean()"
        )
    total, weight = (jnp.asarray(x).astype(real()) for x in pair)
    return total, jax.lax.stop_gradient(weight)


def is_mean(result: Any) -> bool:
    """Whether what a loss returned is a mean, so that every microbatch has weight 1."""
    return not isinstance(result, (tuple, list))


def mean_of(total: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean that a sum and its weight make, and what to multiply a sum's gradients with.

    Where nothing counts (both are 0, as in a batch of padding) both are 0. A sum without a weight,
    and NaN, stay what division makes of them.
    """
    nothing = (total == 0) & (weight == 0)
    weight = jnp.where(nothing, jnp.ones_like(weight), weight)
    return total / weight, jnp.where(nothing, jnp.zeros_like(weight), 1 / weight)


def same_over_others(name: str, result: Any, axes: tuple[str, ...]) -> Any:
    """A result, which ranks along further axes must agree on.

    Args:
      name: whose result it is.
      result: arrays, or their types.
      axes: those over which it may vary.

    Raises:
      ValueError: it varies over another axis.
    """
    for leaf in jax.tree.leaves(result):
        others = sorted(set(varying_in(leaf)) - set(axes))
        if others:
            raise ValueError(
                f"{name} returned a value that differs between the ranks of axis "
                f"{' and '.join(map(repr, others))}; each of them holds only its part of what is "
                f"sharded over it: reduce it (jax.lax.psum), or gather what it is made of "
                f"(jax.lax.all_gather(..., to='invarying')), before it is returned; or, if the "
                f"layers know nothing of it, leave it to the compiler: Pipeline(..., "
                f"auto_axes={tuple(others)!r})"
            )
    return result


def pairing(outputs: Any, cotangents: list[Any]) -> tuple[jax.Array, jax.Array]:
    """The loss whose gradient for the outputs' float leaves is ``cotangents``.

    This is how `pipe(inputs)` is differentiated by the same kernel. Its weight is 0, since its
    gradient must not be normalised.
    """
    floats, _ = partition(outputs)
    total = jnp.zeros(())
    for y, ct in zip(floats, cotangents, strict=True):
        is_complex = jnp.issubdtype(y.dtype, jnp.complexfloating)
        wide = jnp.result_type(complex) if is_complex else real()
        total += jnp.sum(jnp.real(y.astype(wide) * ct.astype(wide)))
    return total, jnp.zeros(())


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float))


def _is_scalar(x: Any) -> bool:
    return _is_array(x) and jnp.shape(x) == ()


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _describe(result: Any) -> str:
    """``float32[8]``, ``(float32[], int32[])``, or the type of what is no array."""
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_describe, result))})"
    if _is_array(result):
        return shape_text(jnp.asarray(result))
    return f"a value of type {type(result).__name__}"
