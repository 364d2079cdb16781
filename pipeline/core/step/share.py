"""The share of a microbatch's loss in the loss of a step, and when it is known.

Letters: M microbatches, D parts of their rows and positions; S and W are the sums of a loss
(sum, weight) and of its weight over all M D calls. A step's loss is S / W, and a microbatch's share
1 / W. A mean of every microbatch has weight 1, so that its share is 1 / (M D) from the start. A
weight that follows from targets is summed up before the step where the step needs it, one that
follows from outputs by running all forward actions first. Otherwise the gradients of S are divided
by W once, after the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Model
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import total_over
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.effects import check_effects
from pipeline.core.step.results import calls_of, totals_of
from pipeline.core.step.run.grouped import make_actions
from pipeline.core.step.run.ticks import run_ticks
from pipeline.core.step.stores.device import StepRequest


@dataclass(frozen=True, eq=False)
class Share:
    """Facts about the loss of a step that are known before it runs.

    Attributes:
      is_mean: whether every microbatch's loss is a mean, and so has weight 1.
      known: the share of a microbatch, a number or a scalar; None before all weights are summed up.
      mean: the step's loss, where its gradient needs that; else None.
    """

    is_mean: bool
    known: Any = None
    mean: Any = None


def find_share(local: LocalModel, plan: Plan, *, is_mean: bool, scaled: bool) -> Share:
    """The share of a microbatch, as early as the step needs it.

    Args:
      local: the rank's part of the model.
      plan: the options of the pipeline.
      is_mean: whether every microbatch's loss is a mean.
      scaled: whether the loss is multiplied with a scale before it is differentiated.

    Raises:
      ValueError: the step is to be added to others, and its gradient needs the loss of them all.
    """
    if is_mean:
        return Share(is_mean, 1 / calls_of(plan))
    # d(S / W) = (dS - S / W dW) / W.
    if "head" not in plan.shared and local.weight_has_gradient():
        _check_that_it_is_all(local.model)
        return of_outputs(local, plan)
    # A scale is chosen for gradients of the mean, and those of a sum might overflow. Losses that
    # stages add are not divided by a loss's weight, and no gradient can be afterwards.
    if not scaled and not local.state.adds:
        return Share(is_mean)
    weight = local.weight_of_targets()
    if weight is None:
        return of_outputs(local, plan) if local.state.adds else Share(is_mean)
    total = total_over(weight, plan.axes.split)
    return Share(is_mean, mean_of(jnp.zeros_like(weight), total)[1])


def of_outputs(local: LocalModel, plan: Plan) -> Share:
    """The share where it follows from outputs: all forward actions run first."""
    program, rank = plan.forward, jax.lax.axis_index(STAGE)
    tables: dict[str, Any] = {}
    for name, table in program.rank_tables.items():
        tables[name] = jnp.moveaxis(jnp.asarray(table), 2, 0)[rank][None]
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
    check_effects(local, again=True, masked=plan.is_masked)
    actions = make_actions(local, program, StepRequest(training=False, take_loss=True))
    run_ticks(actions, program, tables, masked=plan.is_masked)
    totals = totals_of(actions.memory, plan)
    mean, known = mean_of(totals.loss, totals.weight)
    return Share(is_mean=False, known=known, mean=mean)


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


def check_outputs_are_final(local: LocalModel) -> None:
    """Check that a loss which is known before its step is that of the step.

    Raises:
      ValueError: it is of forward actions on state as it was, and the step writes state.
    """
    if local.state.held is not None:
        raise ValueError(
            "stages write declared state, and loss_fn's weight follows from their outputs: where "
            "it has a gradient, or stages call add_loss, a step then knows it too late; let the "
            "weight follow from targets, as the number of those that count, or declare no state"
        )
