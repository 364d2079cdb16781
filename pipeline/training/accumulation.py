"""The calls of one update: sums of losses, metrics and gradients, or all calls as one step.

A sum has the form (Σ mean * weight, Σ weight), as `Weighed` of a sum and its weight. Metrics of
integers are counts: they are added without a weight. An evaluation sums its batches so too.

Letters: C calls, M microbatches of a call, D data shards, N rows of a call.

Losses that parts of a model add (`add_loss`) need all calls at once: with a loss (sum, weight) the
loss of an update is Σ sum / Σ weight plus the mean of the added losses over all C * M microbatches.
A call's backward needs the ratio of their two factors, which depends on the weights of all calls.
So a step keeps the batches of the first calls, and the last call runs all rows as one step of C * M
microbatches, with the same rows in each microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.axes import PARTS
from pipeline.base.precision import MOST, TINY
from pipeline.base.tree import shape_text
from pipeline.base.warn import warn
from pipeline.facade import Weighed, with_microbatches
from pipeline.lint.added import adds_to_a_sum
from pipeline.pipeline import Pipeline
from pipeline.training.scaling import wide
from pipeline.training.state import StepState, pipelines_of, with_replaced

Tree = Any
Sums = tuple[Weighed, Tree, Tree]  # of losses, metrics and gradients
_REASONS = {  # why all calls run as one step, with a remedy, by whether they always do
    False: (
        (
            "stages add losses (add_loss) and the loss is (sum, weight), so that Step(accumulate=) "
            "runs all calls of an update as one step"
        ),
        "give every call a weight= (a Trainer: every Batch), which its added losses then have too",
    ),
    True: (
        "batches_per_update= runs all batches of an update as one step",
        "give batches of equal shapes, or accumulate= in its place",
    ),
}


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

    def tell_dropped(self) -> None:
        """Report calls without an update when their step is deleted, or the program ends."""
        if self.calls:
            sys.stderr.write(
                f"Step(accumulate=) ends with {self.calls} calls after its last update, which have "
                f"no effect; step.flush() makes an update of them\n"
            )

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


# --- all calls as one step


class JoinedCalls:
    """The batches of an update whose calls run as one step.

    Attributes:
      plan: the plan of this step, of C * M microbatches.
      batches: copies of the batches so far, since a loader may write to its arrays.
      why, remedy: the reason why calls run as one step, and what to do if they cannot.
    """

    def __init__(self, plan: Any, reason: tuple[str, str]) -> None:
        self.plan = plan
        self.why, self.remedy = reason
        self.batches: list[Tree] = []

    def check(self, batch: Tree, weight: Any) -> None:
        """Check that a call fits the first call of the update."""
        if not self.batches:
            return
        first, call = self.batches[0], len(self.batches) + 1
        if weight is not None:
            raise ValueError(
                f"weight={weight} in call {call} of an update whose call 1 had none: {self.why}; "
                f"give every call of an update a weight=, or none"
            )
        now, then = map(self._named, (batch, first))
        for name in now | then:
            (leaf, spec), (old, _) = (leaves.get(name, (None, None)) for leaves in (now, then))
            texts = ["missing" if x is None else shape_text(x) for x in (leaf, old)]
            fault = "" if texts[0] == texts[1] else f"is {texts[0]} in call {call} and {texts[1]}"
            has_nan = leaf is not None and jnp.issubdtype(leaf.dtype, jnp.inexact)
            if not fault and spec is None and not jnp.array_equal(leaf, old, equal_nan=has_nan):
                fault = f"has no batch axis, and other values in call {call} than"
            if fault:
                raise ValueError(
                    f"{name} {fault} in call 1 of an update: {self.why}; {self.remedy}"
                )

    def end(self, plan: Any) -> Tree:
        """Return the rows of the calls so far as one batch, for a plan of so many calls."""
        count = len(self.batches)
        self.plan = with_microbatches(plan, count * plan.num_microbatches)
        return self.with_last(self.batches.pop())

    def keep(self, batch: Tree) -> None:
        copy = lambda x: x.copy() if isinstance(x, np.ndarray) else jnp.copy(x)  # noqa: E731
        self.batches.append(jax.tree.map(copy, batch))

    def with_last(self, batch: Tree) -> Tree:
        """Join the rows of all batches: microbatch m of batch c is microbatch c * M + m."""
        shards = self.plan.axes.num_rows
        leaves = [jax.tree.leaves(one) for one in (*self.batches, batch)]
        specs = [spec for _, spec in self._named(batch).values()]
        joined = [
            rows[-1] if spec is None else _interleaved(shards, rows)
            for spec, *rows in zip(specs, *leaves, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(batch), joined)

    def _named(self, batch: Tree) -> dict[str, tuple[Any, Any]]:
        """Return each leaf with its spec, by name."""
        trees = *batch[:2], batch[2] or {}
        return {
            part + jax.tree_util.keystr(path): (leaf, spec)
            for part, tree, specs in zip(
                PARTS, trees, self.plan.axes.leaf_specs(*trees), strict=True
            )
            for (path, leaf), spec in zip(
                jax.tree_util.tree_leaves_with_path(tree), specs, strict=True
            )
        }


def joined_calls(
    model: nnx.Module, batch: Tree, calls: int, *, has_aux: bool, always: bool = False
) -> JoinedCalls | None:
    """Begin an update of C calls; None if each call runs as a step of its own."""
    if not isinstance(model, Pipeline):
        return None
    if not (always or adds_to_a_sum(model, batch, has_aux=has_aux)):
        return None
    count, reason = calls * model.num_microbatches, _REASONS[always]
    try:
        return JoinedCalls(with_microbatches(model.plan, count), reason)
    except ValueError as error:
        raise ValueError(
            f"{reason[0]} of {count} microbatches, and the pipeline's schedule has no timetable "
            f"for them with the same stages on each rank: name one that has (schedule=), or "
            f"{reason[1]}"
        ) from error


def _interleaved(shards: int, rows: Sequence[Any]) -> Any:
    """Stack arrays [N, ...] to [D, C, N / D, ...], and return that as [C * N, ...]."""
    stack: Any = np.stack if all(isinstance(x, np.ndarray) for x in rows) else jnp.stack
    parts = stack([x.reshape(shards, -1, *x.shape[1:]) for x in rows], axis=1)
    return parts.reshape(-1, *parts.shape[3:])


def warn_of_weights(model: nnx.Module) -> None:
    """Warn if stages add losses to a loss (sum, weight), and calls have weights."""
    if any(any(pipe.plan.lint.adds_to_a_sum.values()) for pipe in pipelines_of(model)):
        warn(
            "stages add losses (add_loss), and Step(accumulate=) gives the losses that they add in "
            "a call the weight of this call; so that each microbatch counts once, give the Step a "
            "Pipeline and no weight= (a Trainer: no Batch.weight), or make one call of all rows",
            UserWarning,
        )
