"""The share of a microbatch's loss in a step's loss, and the time when it is known.

Letters: M microbatches, D parts of their rows and positions. For a loss (sum, weight), S and W are
the totals of sum and weight over all M D calls. A step's loss is S / W, and a microbatch's share is
1 / W. A loss that is a mean has weight 1 in every call, so its share is 1 / (M D) from the start.

A step may need W before its backwards. If the weight depends only on targets, it is summed before
the step. If it depends on outputs, all forward actions run once before the step. A step that does
not need W divides the gradients of S by W once, after the last action.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE
from pipeline.base.tree import real
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Model
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import total_over
from pipeline.core.step.calls.rank import LossScale
from pipeline.core.step.opened import OpenedStep, RunForwards
from pipeline.core.step.results import calls_of, totals_of
from pipeline.core.step.run.grouped import make_actions
from pipeline.core.step.run.places import StepRequest
from pipeline.core.step.run.ticks import run_ticks
from pipeline.core.step.stores.totals import StepSums


def find_share(step: OpenedStep, run_forwards: RunForwards | None = None) -> LossScale:
    """Compute the factors of losses that are known, or must be known, before the ticks run.

    Args:
      step: the step, with the caller's scale of its losses.
      run_forwards: a function that computes share and loss if they depend on outputs; `of_outputs`
        by default.

    Raises:
      ValueError: the step will be added to other steps, and its gradient needs the loss of all
        these steps; or the step needs its loss before it runs, and writes state.
    """
    scale = step.rank.loss
    share, mean = _share_and_mean(step, run_forwards or of_outputs)
    # All forwards have run once to compute the loss. In the step they would run again, and write
    # state a second time.
    if mean is not None and step.writes_state:
        raise ValueError(
            "stages write declared state, and loss_fn's weight follows from their outputs: where "
            "it has a gradient, or stages call add_loss, a step then knows it too late; let the "
            "weight follow from targets, as the number of those that count, or declare no state"
        )
    # If the share is known, gradients of the mean are summed, else gradients of the sum.
    share = share if step.request.normalise else None
    of_loss = 1.0 if share is None else share
    if scale.of_caller is not None:
        of_loss = scale.of_caller.astype(real()) * of_loss
    return dataclasses.replace(scale, share=share, of_loss=of_loss, mean=mean)


def _share_and_mean(step: OpenedStep, run_forwards: RunForwards) -> tuple[Any, Any]:
    """Return a microbatch's share and the step's loss; None for a value known only later."""
    # A mean has a known share. For other losses, a share is needed before the ticks only if the
    # weight has a gradient, the caller gives a scale, or stages add losses.
    scale, plan, local = step.rank.loss, step.plan, step.local
    if scale.is_mean:
        return 1 / calls_of(plan), None
    # d(S / W) = (dS - S / W dW) / W.
    if "head" not in plan.shared and local.weight_has_gradient():
        _check_that_it_is_all(local.model)
        return run_forwards(step)
    # A scale is chosen for gradients of the mean; gradients of a sum might overflow with it. Losses
    # that stages add are not divided by the loss's weight, and a joint gradient cannot be divided
    # in part after the step.
    adds = local.rank.facts.adds
    if scale.of_caller is None and not adds:
        return None, None
    weight = local.weight_of_targets()
    if weight is None:
        return run_forwards(step) if adds else (None, None)
    total = total_over(weight, plan.axes.split)
    return mean_of(jnp.zeros_like(weight), total)[1], None


def of_outputs(step: OpenedStep) -> tuple[jax.Array, jax.Array]:
    """Run all forward actions, to compute a share and a loss that depend on outputs."""
    plan, local = step.plan, step.local
    program, rank = plan.forward, jax.lax.axis_index(STAGE)
    tables: dict[str, Any] = {}
    # This runs within the shard_map of the step, whose operands are the tables of another program.
    # So each rank takes its own column of the tables of this program.
    for name, table in program.rank_tables.items():
        tables[name] = jnp.moveaxis(jnp.asarray(table), 2, 0)[rank][None]
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
    plan.lint.effects(local)
    actions = make_actions(plan, local, program, StepRequest(training=False, take_loss=True))
    run_ticks(actions, program, tables)
    return share_of(actions.sums, plan)


def share_of(sums: StepSums, plan: Plan) -> tuple[jax.Array, jax.Array]:
    totals = totals_of(sums, plan)
    mean, share = mean_of(totals.loss, totals.weight)
    return share, mean


def _check_that_it_is_all(model: Model) -> None:
    """Raise ValueError if this step is added to other steps: d(S / W) needs S / W of all steps."""
    if model.weighed:
        raise ValueError(
            "weighed=True (of value_and_grad, or of a Step with accumulate=) with a loss (sum, "
            "weight) whose weight has a gradient, since it follows from outputs or parameters: "
            "gradients of several batches cannot be added up to that of the sum of sums over the "
            "sum of weights; take all rows in one call, with more microbatches, or give each call "
            "of the Step a weight=, to train the mean of the calls' losses"
        )
