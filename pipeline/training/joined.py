"""Calls of one update that run as one step, for losses that parts of a model add (`add_loss`).

Letters: C calls, M microbatches of a call, D data shards, N rows of a call.

With a loss (sum, weight) the loss of an update is Σ sum / Σ weight plus the mean of the added
losses over all C * M microbatches. A call's backward needs the ratio of their two factors, which
depends on the weights of all calls. So a step keeps the batches of the first calls, and the last
call runs all rows as one step of C * M microbatches, with the same rows in each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.axes import PARTS
from pipeline.base.tree import shape_text
from pipeline.base.warn import warn
from pipeline.facade import with_microbatches
from pipeline.lint.added import adds_to_a_sum
from pipeline.pipeline import Pipeline
from pipeline.training.state import pipelines_of

Tree = Any
_WHY = (
    "stages add losses (add_loss) and the loss is (sum, weight), so that Step(accumulate=) runs "
    "all calls of an update as one step"
)
_REMEDY = "give every call a weight= (a Trainer: every Batch), which its added losses then have too"


class JoinedCalls:
    """The batches of an update whose calls run as one step.

    Attributes:
      plan: the plan of this step, of C * M microbatches.
      batches: copies of the batches so far, since a loader may write to its arrays.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.batches: list[Tree] = []

    def check(self, batch: Tree, weight: Any) -> None:
        """Check that a call fits the first call of the update."""
        if not self.batches:
            return
        first, call = self.batches[0], len(self.batches) + 1
        if weight is not None:
            raise ValueError(
                f"weight={weight} in call {call} of an update whose call 1 had none: {_WHY}; give "
                f"every call of an update a weight=, or none"
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
                raise ValueError(f"{name} {fault} in call 1 of an update: {_WHY}; {_REMEDY}")

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
    model: nnx.Module, batch: Tree, calls: int, *, has_aux: bool
) -> JoinedCalls | None:
    """Begin an update of C calls; None if each call runs as a step of its own."""
    if not isinstance(model, Pipeline) or not adds_to_a_sum(model, batch, has_aux=has_aux):
        return None
    count = calls * model.num_microbatches
    try:
        return JoinedCalls(with_microbatches(model.plan, count))
    except ValueError as error:
        raise ValueError(
            f"{_WHY} of {count} microbatches, and the pipeline's schedule has no timetable for "
            f"them with the same stages on each rank: name one that has (schedule=), or "
            f"{_REMEDY}"
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
