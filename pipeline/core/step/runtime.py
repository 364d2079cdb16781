"""The kernel: one `shard_map`, in which every rank runs the ticks of a program.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards. The kernel knows
no schedule. It gives every rank its part of the program's tables, the weights and the batch. It
reduces the sums of the ticks (`pipeline.core.step.run.ticks`) once, after the last tick. The entry
points are `train`, `evaluate`, `outputs` and `logprobs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from pipeline.base.tree import Leaves, Tree, partition, real
from pipeline.base.warn import warn_once
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import constrain
from pipeline.core.step.calls.groups import GroupedModel
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.rank import LossScale
from pipeline.core.step.inspect import inspect
from pipeline.core.step.jitted import PerPlan
from pipeline.core.step.ranks import (
    gradient_specs,
    in_order,
    input_specs,
    make_rank,
    manual,
    run_on_ranks,
)
from pipeline.core.step.results import (
    Gradients,
    StateLeaves,
    calls_of,
    evaluation_results,
    outputs_of,
    own_logits_of,
    state_after,
    training_results,
)
from pipeline.core.step.run.grouped import make_actions
from pipeline.core.step.run.places import StepRequest
from pipeline.core.step.run.ticks import run_ticks
from pipeline.core.step.share import find_share
from pipeline.core.step.stores.store import Row
from pipeline.core.step.stores.totals import StepSums
from schedules.lowering.needs import without
from schedules.lowering.program import Program

NOTHING_TO_GATHER = (
    "remat='gathered' gathers nothing again: a stage's backward reads no result of an "
    "all-gather outside of its loops, so residuals are kept as with remat=None; "
    "for sequence parallel layers in a mesh with tensor ranks call blocks in a Python loop, "
    "not in a scan; otherwise give remat=None"
)


@PerPlan
def train(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    scale: Any = None,
    runs: jax.Array | None = None,
    *,
    want_inputs: bool = False,
    normalise: bool = True,
) -> tuple[Any, Gradients, Leaves, StateLeaves]:
    """Run a schedule, forward and backward.

    Args:
      plan: the options of the pipeline, static.
      model: the user's model, static.
      weights: [S, ...] leaves of chunks, and leaves of the ends.
      batch: [N, ...] leaves.
      scale: a scalar that multiplies the loss before differentiation. Without ``normalise``, a pair
        of scalars: the factor of sums, and the factor of the mean of added losses.
      runs: [T, slots, S] the entries of the program's table that run, to time them. The other
        entries are idle and send no message.
      want_inputs: whether to return gradients for the inputs.
      normalise: whether to divide by the total weight of the loss.

    Returns:
      The loss, a float32 scalar that is not scaled, or (loss, metrics) if metrics are wanted, with
      means as `Weighed` if the model asks for them; gradients for the trained leaves of
      ``weights.chunks`` and ``weights.ends``; gradients [N, ...] for the inputs' float leaves; and
      the declared state after the step.
    """
    # The trained parameters decide which gradients each backward computes, and so which messages
    # are sent. All of this is static.
    needs = model.trained.needs_gradients(want_inputs=want_inputs)
    if plan.schedule.num_slices > 1:  # one pullback returns gradients of carries and of the input
        needs = tuple(dataclasses.replace(need, x=True) for need in needs)
    program = without(plan.training, [need.x for need in needs])
    of_inputs = input_specs(batch) if want_inputs else []

    def body(tables: Row, weights: Weights, batch: Batch, scale: Any) -> Any:
        # Before the ticks: the rank's arrays, a trace of its model, and the factor of its losses.
        rank = make_rank(plan, model, weights, batch)
        rank = dataclasses.replace(rank, loss=loss_scale(plan, scale))
        traced = inspect(plan, rank, needs, reaches=want_inputs or model.trained.embed)
        loss = find_share(plan, traced, normalise=normalise)
        plan.lint.whole(plan, traced, training=True, unread=normalise)
        declared = traced.make_declared_state(plan, training=True)
        local = traced.local(loss=loss, declared=declared)
        # The ticks, and after them all reductions over mesh axes.
        step = StepRequest(training=True, take_loss=True, want_inputs=want_inputs)
        sums = _train(local, plan, program, tables, step, by_table=runs is not None)
        return training_results(local, plan, sums, weights, of_inputs, normalise=normalise)

    specs = gradient_specs(model)
    out_specs = P(), manual(plan, specs), of_inputs, manual(plan, model.state_specs)
    run = run_on_ranks(plan, model, program, body, out_specs, runs)
    loss, grads, inputs, state = run(weights, batch, scale)
    # The kernel's specs lack the axes that are left to the compiler: constrain the gradients'
    # sharding over these axes here.
    if plan.auto_axes:
        grads = constrain(grads, specs, plan.mesh)
    return loss, grads, _ordered_inputs(plan, inputs, of_inputs, batch), state


def loss_scale(plan: Plan, scale: Any) -> LossScale:
    """Compute those factors of losses that are known before the total weight of the losses is."""
    of_caller, of_added = scale if isinstance(scale, tuple) else (scale, scale)
    added = 1 if of_added is None else of_added.astype(real())
    return LossScale(of_caller=of_caller, of_added=added / calls_of(plan))


def _ordered_inputs(plan: Plan, gradients: Leaves, specs: list[P], batch: Batch) -> Leaves:
    """Return gradients in the shapes of the inputs, with positions in the inputs' order."""
    pairs = zip(gradients, specs, strict=True)
    ordered = [in_order(plan, leaf, spec, back=True) for leaf, spec in pairs]
    if not ordered or plan.schedule.num_slices == 1:
        return ordered
    # An input with one entry for all positions was read by every slice: its gradient is the sum.
    whole = zip(ordered, partition(batch.inputs)[0], strict=True)
    return [g if g.shape == x.shape else g.sum(1, keepdims=True) for g, x in whole]


@PerPlan
def evaluate(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_share: bool = False
) -> tuple[Any, StateLeaves]:
    """Run forward actions; return the loss, or (loss, metrics), on every rank, and declared state.

    With ``want_share`` the loss comes with a microbatch's share, the factor for gradients of sums,
    and the step counts as a training step.
    """

    def results(local: LocalModel, sums: StepSums) -> Any:
        return evaluation_results(local, plan, sums, want_share=want_share)

    step = StepRequest(training=False, take_loss=True)
    return _infer(plan, model, weights, batch, step, results, P(), training=want_share)


@PerPlan
def outputs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """Run forward actions; return [N, ...] outputs on every rank, and declared state."""
    arguments, lie = (plan, model, weights, batch), plan.axes.output_spec
    step = StepRequest(training=False, take_loss=False)
    if "head" in plan.shared:  # every rank has its words' logits of each row
        logits_of = lambda _, sums: own_logits_of(sums, plan)  # noqa: E731
        values, state = _infer(*arguments, step, logits_of, P(STAGE, *lie))
        values = jnp.moveaxis(values, 0, -1)[..., : model.tables.head_words]
        return in_order(plan, values, lie, back=True), state
    values = _infer(*arguments, step, lambda _, sums: outputs_of(sums, plan), lie)
    return _ordered_outputs(values, plan)


@PerPlan
def logprobs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """Run forward actions; return [N, ...] float32 log-probabilities of targets, and state."""
    arguments, lie = (plan, model, weights, batch), plan.axes.output_spec
    step = StepRequest(training=False, take_loss=False, logprobs=True)
    results = _infer(*arguments, step, lambda _, sums: outputs_of(sums, plan), lie)
    return _ordered_outputs(results, plan)


def _ordered_outputs(results: tuple[Tree, StateLeaves], plan: Plan) -> tuple[Tree, StateLeaves]:
    """Return outputs with their positions in order, and declared state."""
    values, state = results
    spec = plan.axes.output_spec
    return jax.tree.map(lambda x: in_order(plan, x, spec, back=True), values), state


def _infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    step: StepRequest,
    results: Callable[[LocalModel, StepSums], Any],
    spec: P,
    *,
    training: bool = False,
) -> tuple[Any, StateLeaves]:
    """Run forward actions; return their results, and declared state.

    Args:
      plan: the options of the pipeline.
      model: the user's model.
      weights: [S, ...] leaves of chunks, and leaves of the ends.
      batch: [N, ...] leaves.
      step: the request: whether a loss or log-probabilities are wanted.
      results: a function that makes the results from the rank's model and sums.
      spec: the spec of the results.
      training: whether the step counts as a training step.
    """
    needs = model.trained.needs_gradients(want_inputs=False, backward=False)

    def body(tables: Row, weights: Weights, batch: Batch, _: None) -> tuple[Any, StateLeaves]:
        rank = make_rank(plan, model, weights, batch)
        rank = dataclasses.replace(rank, loss=LossScale(counts=step.take_loss))
        # There is no backward, but the traces are those of training, so that calls of stages agree.
        traced = inspect(plan, rank, needs, take_loss=step.take_loss)
        if not (step.take_loss or step.logprobs):
            plan.lint.outputs(traced.local())
        plan.lint.whole(plan, traced, training=training)
        local = traced.local(declared=traced.make_declared_state(plan, training=training))
        actions = make_actions(plan, local, plan.forward, step)
        run_ticks(actions, plan.forward, tables)
        state = state_after(local, weights, plan, training=training)
        return results(local, actions.sums), state

    out_specs = spec, manual(plan, model.state_specs)
    return cast(
        "tuple[Any, StateLeaves]",
        run_on_ranks(plan, model, plan.forward, body, out_specs)(weights, batch),
    )


def _train(
    local: LocalModel,
    plan: Plan,
    program: Program,
    tables: Row,
    step: StepRequest,
    *,
    by_table: bool,
) -> StepSums:
    """Run the forward and backward actions of a step; return its sums."""
    # A rank that needs no timetable runs one loop (`Straight`), unless entries of a table are
    # timed (`runs`).
    is_alike = not isinstance(local, GroupedModel)
    plan.facts.straight = plan.is_straight and is_alike and local.rank.declared is None
    if plan.facts.straight and not by_table:
        from pipeline.core.step.run.straight import Straight

        straight = Straight(local, plan.schedule.num_microbatches, step)
        straight.run()
        return straight.sums
    if plan.keep == "input":
        plan.lint.effects(local)
    actions = make_actions(plan, local, program, step)
    if plan.remat == "gathered" and not actions.saved.residuals.gathers:
        warn_once(NOTHING_TO_GATHER, plan.compiled.warned, "gathered")
    halves = actions.halves
    plan.facts.unsplit = tuple(halves.whole) if halves else ()
    run_ticks(actions, program, tables)
    return actions.sums
