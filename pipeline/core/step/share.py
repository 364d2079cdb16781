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

from collectives import vary
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition, real
from pipeline.core.autodiff.jaxpr.dead_code import lean
from pipeline.core.autodiff.jaxpr.reachability import needed_inputs
from pipeline.core.autodiff.jaxpr.reader import read_block
from pipeline.core.autodiff.jaxpr.steps import run_block
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Model
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import total_over
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.opened import OpenedStep, RunForwards
from pipeline.core.step.calls.rank import LossScale, Rank
from pipeline.core.step.results import calls_of, totals_of
from pipeline.core.step.stores.totals import StepSums


def find_share(step: OpenedStep, run_forwards: RunForwards) -> LossScale:
    """Compute the factors of losses that are known, or must be known, before the ticks run.

    Args:
      step: the step, with the caller's scale of its losses.
      run_forwards: a function that computes share and loss if they depend on outputs.

    Raises:
      ValueError: the step will be added to other steps, and its gradient needs the loss of all
        these steps; or the step needs its loss before it runs, and writes state.
    """
    scale = step.rank.loss
    share, mean = _share_and_mean(step, run_forwards)
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
    scale, plan, rank = step.rank.loss, step.plan, step.rank
    if scale.is_mean:
        return 1 / calls_of(plan), None
    # d(S / W) = (dS - S / W dW) / W.
    if "head" not in plan.shared and _weight_has_gradient(step):
        _check_that_it_is_all(rank.model)
        return run_forwards(step)
    # A scale is chosen for gradients of the mean; gradients of a sum might overflow with it. Losses
    # that stages add are not divided by the loss's weight, and a joint gradient cannot be divided
    # in part after the step.
    adds = rank.facts.adds
    if scale.of_caller is None and not adds:
        return None, None
    # The loss has another shape for each slice of another length, so each sums its own weights.
    weights = [_weight_of_targets(own, of.types[-1]) for own, of in step.by_slice]
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights):
        return run_forwards(step) if adds else (None, None)
    weight = sum(known[1:], known[0])
    total = total_over(weight, plan.axes.split)
    return mean_of(jnp.zeros_like(weight), total)[1], None


def _weight_has_gradient(step: OpenedStep) -> bool:
    """Tell by a trace whether the weight of a loss (sum, weight) has a gradient.

    A count has no gradient, and neither has a weight that depends only on targets.
    """
    rank = step.rank
    y = blank(step.activations.types[-1], rank.axes)
    floats, others = partition(y)

    def weigh(weights: Leaves, floats: Leaves) -> jax.Array:
        return vary(_weight(rank, weights, combine(y, floats, others)), rank.axes)

    def back(primals: Any, ct: jax.Array) -> Any:
        return jax.vjp(ends.pure(rank, weigh), *primals)[1](ct)

    # The weight has no gradient if the pullback's results do not depend on the cotangent: then the
    # pullback without dead code does not read its last input.
    closed = jax.make_jaxpr(back)((rank.ends, floats), vary(jnp.zeros((), real()), rank.axes))
    wanted = [True] * len(closed.jaxpr.outvars)
    return needed_inputs(lean(read_block(closed), wanted, ()), wanted, (), adds=False)[-1]


def _weight_of_targets(rank: Rank, y: Tree) -> jax.Array | None:
    """Sum the weights of a data shard's losses; None if weights depend on more than targets.

    If slices differ in length, sum the weights of this rank's slice in every microbatch. ``y`` are
    the types of the last stage's output.
    """
    # No stage has to run for the sum if the weight does not read outputs.
    targets, y = rank.batch.targets, blank(y, rank.axes)
    if (part := rank.slices.number) is not None:
        targets = jax.tree.map(lambda x: x[part :: rank.slices.count], targets)

    def weigh(y: Tree, of_one: Tree) -> jax.Array:
        return jax.lax.stop_gradient(_weight(rank, rank.ends, y, targets=of_one))

    # The head runs in this trace, and is dead code in it if the weight does not read outputs.
    block = lean(read_block(jax.make_jaxpr(weigh)(y, at(targets, 0))), [True], ())
    leaves = jax.tree.leaves(y)
    if any(needed_inputs(block, [True], (), adds=False)[: len(leaves)]):
        return None

    def add(total: jax.Array, of_one: Tree) -> tuple[jax.Array, None]:
        return total + run_block(block, [*leaves, *jax.tree.leaves(of_one)])[0], None

    return jax.lax.scan(add, vary(jnp.zeros((), real()), rank.axes), targets)[0]


def _weight(rank: Rank, weights: Leaves, y: Tree, *, targets: Tree = None) -> jax.Array:
    outputs = ends.finish(rank, weights, y, 0, take_loss=False).value
    return ends.take_loss_of(rank, weights, outputs, 0, targets=targets)[0].weight


def share_of(sums: StepSums, plan: Plan) -> tuple[jax.Array, jax.Array]:
    mean, share = mean_of(*totals_of(sums, plan)[:2])
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
