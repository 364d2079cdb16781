"""Sums of losses, metrics and gradients over the calls of one update, and over batches.

A sum has the form (Σ mean * weight, Σ weight), as `Weighed` of a sum and its weight. Metrics of
integers are counts: they are added without a weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.base.precision import MOST, TINY
from pipeline.base.tree import shape_text
from pipeline.facade import Weighed
from pipeline.training.joined import JoinedCalls
from pipeline.training.scaling import wide
from pipeline.training.state import StepState, with_replaced

Tree = Any
Sums = tuple[Weighed, Tree, Tree]  # of losses, metrics and gradients


class Accumulation:
    """The calls of an update under way.

    Attributes:
      calls: the number of calls since the last update.
      sums: the sums of these calls; None before the first call.
      joined: the batches of these calls, if all calls of the update run as one step; else None.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self.begin()

    def begin(self) -> None:
        """Begin an update without calls."""
        self.calls = 0
        self.sums: Sums | None = None
        self.joined: JoinedCalls | None = None
        self._written: dict[int, jax.Array] = {}

    def read(self) -> list[jax.Array]:
        """List the leaves of model and optimizer as the calls so far have left them."""
        return with_replaced(self._state.read(), self._written)

    def keep(self, written: dict[int, jax.Array], sums: Sums) -> None:
        """Keep the leaves that a call has written, by number, and the sums with this call."""
        self._written, self.sums = written, sums


def zero_sums(state: StepState, metrics: Tree) -> Sums:
    """Make zero sums: of the loss, of metrics of given types, and of gradients.

    Sums of gradients are in float32 or wider, and sharded like the weights.
    """

    def zeros(weights: Tree) -> Tree:
        return jax.tree.map(lambda x: jnp.zeros_like(x, wide(x)), weights)

    def zero_metric(x: Any) -> jax.Array:
        with jax.enable_x64(True):
            return jnp.zeros(x.shape, jnp.int64 if is_count(x) else x.dtype)

    grads = state.of_weights(zeros)
    loss = Weighed(jnp.zeros(()), jnp.zeros(()))
    return *state.replicate((loss, jax.tree.map(zero_metric, metrics))), grads


def add_call(sums: Sums, call: Sums) -> Sums:
    """Add loss and metrics of one call, with their weight, and its gradients to the sums."""
    *means, grads = call
    *totals, total = sums
    weight = means[0].weight
    added = jax.tree.map(lambda t, g: _plus_part(t, g, weight), total, grads)
    return *plus_weighed(totals, means), added


def mean_of_calls(sums: Sums, like: Tree) -> tuple[Tree, Tree]:
    """Compute the means of sums: (loss, metrics), and gradients in the dtypes of ``like``."""
    *means, grads = sums
    weight = means[0].weight
    grads = jax.tree.map(lambda g, w: _over(g, weight).astype(w.dtype), grads, like)
    return jax.tree.map(lambda x: _bounded(x) if is_count(x) else x, mean_weighed(means)), grads


def with_weight(means: Tree, weight: jax.Array) -> Tree:
    """Attach the call's weight to its means; counts have no weight."""
    return jax.tree.map(lambda x: x if is_count(x) else Weighed(x, weight), means)


def plus_weighed(sums: Tree, means: Tree) -> Tree:
    """Add the means of one call, with their weights, to the sums; counts are added.

    Counts are added as int64 even if JAX has no 64 bits otherwise, so that they do not wrap.
    """

    def plus(t: Any, x: Any) -> Any:
        if not isinstance(x, Weighed):
            with jax.enable_x64(True):
                return t + x.astype(jnp.int64)
        return Weighed(_plus_part(t.mean, x.mean, x.weight), t.weight + x.weight)

    return jax.tree.map(plus, sums, means, is_leaf=_is_weighed)


def mean_weighed(sums: Tree) -> Tree:
    """Compute the means of the sums of `plus_weighed`; 0 if the weight is 0."""

    def mean(t: Any) -> Any:
        return _over(t.mean, t.weight) if isinstance(t, Weighed) else t

    return jax.tree.map(mean, sums, is_leaf=_is_weighed)


def is_count(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def check_weight(weight: Any) -> None:
    """Check a weight; only the shape of a device array, so that no code waits for the value."""
    if weight is None:
        return
    if isinstance(weight, jax.Array):
        fits = weight.shape == ()
    else:
        array = np.asarray(weight)
        fits = array.shape == () and array.dtype.kind in "uif"
        fits = fits and (float(array) == 0 or TINY <= float(array) <= MOST)
    if not fits:
        given = shape_text(weight) if isinstance(weight, jax.Array) else repr(weight)
        raise ValueError(
            f"weight={given}: must be one finite number >= 0 of float32, the weight of this call "
            f"relative to other calls"
        )


def _is_weighed(x: Any) -> bool:
    return isinstance(x, Weighed)


def _plus_part(total: jax.Array, part: jax.Array, weight: jax.Array) -> jax.Array:
    """Add a part to a sum; a part of weight 0 may be NaN."""
    part = part.astype(total.dtype) * weight.astype(total.dtype)
    return total + jnp.where(weight == 0, jnp.zeros_like(part), part)


def _bounded(count: jax.Array) -> jax.Array:
    """Convert a count to an integer of JAX's width, clipped to its range."""
    kind = jax.dtypes.canonicalize_dtype(np.int64)
    least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    with jax.enable_x64(True):
        return jnp.clip(count, least, most).astype(kind)


def _over(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight == 0, 1, weight).astype(total.dtype)
