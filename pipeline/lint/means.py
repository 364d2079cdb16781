"""A warning of a loss that is no mean over rows, so that it depends on M and on the mesh.

A step takes the mean of the losses of its microbatches and data shards. That is the loss of the
whole batch if the loss is a mean over rows, or (sum, weight) that are both sums over rows. A trial
on random numbers compares the loss of rows together with that of their halves.

Letters: M microbatches, b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import jax

from pipeline.base.warn import warn_once
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.positions import is_ours, loss_of, specs_of, try_loss, unit_of
from pipeline.lint.trial import Cut


def warn_of_joined_rows(plan: Plan, rank: Rank, activations: Activations) -> None:
    """Warn, once, of a loss that is no mean over rows."""
    tried, warned = "joined rows", plan.compiled.warned
    shards, count = plan.axes.num_rows, plan.schedule.num_microbatches
    is_done = tried in warned or count * shards == 1 or is_ours(rank.model.loss_fn)
    if is_done or rank.slices.count > 1 or rank.model.tables.head >= 0:
        return
    warned.add(tried)
    pairs = zip(jax.tree.leaves(unit_of(rank)), specs_of(rank), strict=True)
    dims = [0 if spec is not None and leaf.shape else None for leaf, spec in pairs]
    loss = loss_of(rank, activations)
    x_dims = [0 if leaf.shape else None for leaf in jax.tree.leaves(loss.x)]
    growth = try_loss(lambda: loss.trial(rank, Cut((1, 1)), x_dims, dims))
    if growth is None:
        return
    why = "it is a sum over rows that is not divided by the number of rows"
    why = why if growth.is_constant else growth.text
    over = f"{count} microbatches" if count > 1 else "one microbatch"
    over += f" on each of {shards} data shards" if shards > 1 else ""
    warn_once(
        f"loss_fn is no mean over rows ({why}), and a step takes the mean of its values for "
        f"{over}, so loss and gradients depend on num_microbatches and the mesh: return (sum, "
        f"weight) that are both sums over rows; or, where rows are compared with each other, "
        f"differentiate your loss of pipe(inputs), which has the whole batch",
        warned,
        "no mean over rows",
    )
