"""The share of a microbatch's loss in a step's loss, and the time when it is known.

Letters: M microbatches, D parts of their rows and positions; S and W are the sums of a loss
(sum, weight) and of its weight over all M D calls. A step's loss is S / W, and a microbatch's share
1 / W. A mean of every microbatch has weight 1, so that its share is 1 / (M D) from the start. A
weight that follows from targets is summed up before the step where the step needs it, one that
follows from outputs by running all forward actions first. Otherwise the gradients of S are divided
by W once, after the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE
from pipeline.base.tree import real
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Model
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import total_over
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.rank import LossScale
from pipeline.core.step.inspect import Inspected
from pipeline.core.step.results import calls_of, totals_of
from pipeline.core.step.run.grouped import make_actions
from pipeline.core.step.run.places import StepRequest
from pipeline.core.step.run.ticks import run_ticks
from pipeline.core.step.stores.totals import StepSums

RunForwards = Callable[[LocalModel, Plan], tuple[jax.Array, jax.Array]]


def find_share(
    plan: Plan,
    traced: Inspected,
    *,
    normalise: bool,
    run_forwards: RunForwards | None = None,
) -> LossScale:
    """The factors of losses that are known, or must be known, before the ticks run.

    Args:
      plan: the options of the pipeline.
      traced: the rank, with the caller's scale of its losses.
      normalise: whether gradients are those of the step's loss, and not of a sum.
      run_forwards: gives share and loss where they follow from outputs; `of_outputs` by default.

    Raises:
      ValueError: the step is to be added to others, and its gradient needs the loss of them all; or
        it needs its loss before it runs, and writes state.
    """
    scale = traced.rank.loss
    share, mean = _share_and_mean(plan, traced, run_forwards or of_outputs)
    # To know the loss, all forwards have run once. In the step they run again, and would write
    # state a second time.
    if mean is not None and traced.writes_state(plan, training=True):
        raise ValueError(
            "stages write declared state, and loss_fn's weight follows from their outputs: where "
            "it has a gradient, or stages call add_loss, a step then knows it too late; let the "
            "weight follow from targets, as the number of those that count, or declare no state"
        )
    # Where the share is known, gradients of the mean are summed, else those of the sum.
    share = share if normalise else None
    of_loss = 1.0 if share is None else share
    if scale.of_caller is not None:
        of_loss = scale.of_caller.astype(real()) * of_loss
    return dataclasses.replace(scale, share=share, of_loss=of_loss, mean=mean)


def _share_and_mean(plan: Plan, traced: Inspected, run_forwards: RunForwards) -> tuple[Any, Any]:
    """Return a microbatch's share and the step's loss; None for a value known only later."""
    # Only a weight with a gradient, a caller's scale or added losses need a share before the ticks
    # that is not known from the start.
    scale = traced.rank.loss
    if scale.is_mean:
        return 1 / calls_of(plan), None
    local = traced.local()
    # d(S / W) = (dS - S / W dW) / W.
    if "head" not in plan.shared and local.weight_has_gradient():
        _check_that_it_is_all(local.model)
        return run_forwards(local, plan)
    # A scale is chosen for gradients of the mean, and those of a sum might overflow. Losses that
    # stages add are not divided by a loss's weight, and no gradient can be afterwards.
    adds = local.rank.facts.adds
    if scale.of_caller is None and not adds:
        return None, None
    weight = local.weight_of_targets()
    if weight is None:
        return run_forwards(local, plan) if adds else (None, None)
    total = total_over(weight, plan.axes.split)
    return mean_of(jnp.zeros_like(weight), total)[1], None


def of_outputs(local: LocalModel, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Share and loss where they follow from outputs: all forward actions run first."""
    program, rank = plan.forward, jax.lax.axis_index(STAGE)
    tables: dict[str, Any] = {}
    # This runs within the shard_map of the step, whose operands are the tables of another program:
    # a rank takes its column of these itself.
    for name, table in program.rank_tables.items():
        tables[name] = jnp.moveaxis(jnp.asarray(table), 2, 0)[rank][None]
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
    plan.lint.effects(local)
    actions = make_actions(plan, local, program, StepRequest(training=False, take_loss=True))
    run_ticks(actions, program, tables)
    return share_of(actions.sums, plan)


def share_of(sums: StepSums, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The share and the mean loss, from the sums of all forward actions."""
    totals = totals_of(sums, plan)
    mean, share = mean_of(totals.loss, totals.weight)
    return share, mean


def _check_that_it_is_all(model: Model) -> None:
    """Check that a ratio is not one of several whose sums and weights are to be added.

    Raises:
      ValueError: it is, and d(S / W) needs S / W of all.
    """
    if model.weighed:
        raise ValueError(
            "weighed=True (of value_and_grad, or of a Step with accumulate=) with a loss (sum, "
            "weight) whose weight has a gradient, since it follows from outputs or parameters: "
            "gradients of several batches cannot be added up to that of the sum of sums over the "
            "sum of weights; take all rows in one call, with more microbatches, or give each call "
            "of the Step a weight=, to train the mean of the calls' losses"
        )
