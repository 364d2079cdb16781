"""The kernel: one `shard_map`, in which every rank runs the ticks of a program.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards. The kernel knows
no schedule. It gives every rank its part of the program's tables, the weights and the batch. It
reduces the sums of the ticks (`pipeline.core.step.run.ticks`) once, after the last tick. The entry
points are `train`, `evaluate`, `outputs` and `logprobs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collectives import STAGE
from pipeline.base.tree import Leaves, Tree
from pipeline.base.warn import warn_once
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import constrain
from pipeline.core.step.calls.opened import OpenedStep, StepInputs
from pipeline.core.step.calls.rank import StepRequest, training_request
from pipeline.core.step.jitted import PerPlan
from pipeline.core.step.open import find_needs, open_step
from pipeline.core.step.ranks import (
    gradient_specs,
    in_order,
    input_specs,
    manual,
    order_inputs,
    run_on_ranks,
)
from pipeline.core.step.results import (
    Gradients,
    StateLeaves,
    evaluation_results,
    join_logits,
    outputs_of,
    own_logits_of,
    state_after,
    training_results,
)
from pipeline.core.step.run.rank_actions import RankActions
from pipeline.core.step.run.ticks import run_ticks
from pipeline.core.step.share import share_of
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
      normalise: whether to divide by the total weight of the loss.

    Returns:
      The loss, a float32 scalar that is not scaled, or (loss, metrics) if metrics are wanted, with
      means as `Weighed` if the model asks for them; gradients for the trained leaves of
      ``weights.chunks`` and ``weights.ends``; gradients [N, ...] for the inputs' float leaves; and
      the declared state after the step.
    """
    request = training_request(want_inputs=want_inputs, normalise=normalise)
    # The trained parameters decide which gradients each backward computes, and so which messages
    # are sent. All of this is static.
    needs = find_needs(plan, model, request)
    program = without(plan.training, [need.x for need in needs])
    of_inputs = input_specs(batch) if want_inputs else []

    def results(step: OpenedStep, sums: StepSums, weights: Weights) -> Any:
        return training_results(step, sums, weights, of_inputs)

    specs = gradient_specs(model)
    out_specs = P(), manual(plan, specs), of_inputs, manual(plan, model.state_specs)
    run = _run(plan, model, request, program, results, out_specs, runs)
    loss, grads, inputs, state = run(weights, batch, StepInputs(scale))
    # The kernel's specs lack the axes that are left to the compiler: constrain the gradients'
    # sharding over these axes here.
    if plan.auto_axes:
        grads = constrain(grads, specs, plan.mesh)
    return loss, grads, order_inputs(plan, inputs, of_inputs, batch), state


def _run(
    plan: Plan,
    model: Model,
    request: StepRequest,
    program: Program,
    results: Callable[[OpenedStep, StepSums, Weights], Any],
    out_specs: Any,
    runs: jax.Array | None = None,
) -> Any:
    """Make the function that runs a step on every rank, and computes its results from the sums."""
    of_step = plan, model, request

    def body(tables: Row, weights: Weights, batch: Batch, inputs: StepInputs) -> Any:
        step = open_step(*of_step, weights, batch, inputs, run_forwards=run_forwards)
        sums = _run_actions(step, program, tables, by_table=runs is not None)
        # After the ticks all reductions over mesh axes.
        return results(step, sums, weights)

    return run_on_ranks(plan, model, program, body, out_specs, runs)


def _run_actions(step: OpenedStep, program: Program, tables: Row, *, by_table: bool) -> StepSums:
    plan, request = step.plan, step.request
    if request.training:
        # A rank that needs no timetable runs one loop (`Straight`), unless entries of a table are
        # timed (`runs`).
        is_one = len(step.kinds) == 1 and step.rank.declared is None
        plan.facts.straight = plan.is_straight and is_one
        if plan.facts.straight and not by_table:
            from pipeline.core.step.run.straight import Straight

            straight = Straight(step)
            straight.run()
            return straight.sums
        if plan.keep == "input":
            plan.lint.effects(step)
    actions = RankActions(step, program)
    if request.training:
        if plan.remat == "gathered" and not actions.gathers:
            warn_once(NOTHING_TO_GATHER, plan.compiled.warned, "gathered")
        plan.facts.unsplit = actions.unsplit
    run_ticks(actions, tables)
    return actions.sums


def run_forwards(step: OpenedStep) -> tuple[jax.Array, jax.Array]:
    """Run all forward actions, to compute a share and a loss that depend on outputs."""
    plan = step.plan
    program, rank = plan.forward, jax.lax.axis_index(STAGE)
    tables: dict[str, Any] = {}
    # This runs within the shard_map of the step, whose operands are the tables of another program.
    # So each rank takes its own column of the tables of this program.
    for name, table in program.rank_tables.items():
        tables[name] = jnp.moveaxis(jnp.asarray(table), 2, 0)[rank][None]
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
    plan.lint.effects(step)
    request = StepRequest(training=False, take_loss=True)
    actions = RankActions(dataclasses.replace(step, request=request), program)
    run_ticks(actions, tables)
    return share_of(actions.sums, plan)


@PerPlan
def evaluate(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_share: bool = False
) -> tuple[Any, StateLeaves]:
    """Run forward actions; return the loss, or (loss, metrics), on every rank, and declared state.

    With ``want_share`` the loss comes with a microbatch's share, the factor for gradients of sums,
    and the step counts as a training step.
    """
    request = StepRequest(training=False, take_loss=True, counts=want_share)
    return _infer(plan, model, weights, batch, request, evaluation_results, P())


@PerPlan
def outputs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """Run forward actions; return [N, ...] outputs on every rank, and declared state."""
    arguments, request = (plan, model, weights, batch), StepRequest(training=False, take_loss=False)
    if "head" not in plan.shared:
        return _outputs(*arguments, request)
    spec = plan.axes.output_spec  # every rank has its words' logits of each row
    logits_of = lambda _, sums: own_logits_of(sums, plan)  # noqa: E731
    values, state = _infer(*arguments, request, logits_of, P(STAGE, *spec))
    return in_order(plan, join_logits(values, model), spec, back=True), state


@PerPlan
def logprobs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, StateLeaves]:
    """Run forward actions; return [N, ...] float32 log-probabilities of targets, and state."""
    request = StepRequest(training=False, take_loss=False, logprobs=True)
    return _outputs(plan, model, weights, batch, request)


def _outputs(
    plan: Plan, model: Model, weights: Weights, batch: Batch, request: StepRequest
) -> tuple[Tree, StateLeaves]:
    """Return outputs with their positions in order, and declared state."""
    spec, results = plan.axes.output_spec, lambda _, sums: outputs_of(sums, plan)
    values, state = _infer(plan, model, weights, batch, request, results, spec)
    return jax.tree.map(lambda x: in_order(plan, x, spec, back=True), values), state


def _infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    request: StepRequest,
    results: Callable[[OpenedStep, StepSums], Any],
    spec: P,
) -> tuple[Any, StateLeaves]:
    """Run forward actions; return their results, which have this spec, and declared state."""

    def with_state(step: OpenedStep, sums: StepSums, weights: Weights) -> tuple[Any, StateLeaves]:
        return results(step, sums), state_after(step, weights)

    out_specs = spec, manual(plan, model.state_specs)
    run = _run(plan, model, request, plan.forward, with_state, out_specs)
    found: tuple[Any, StateLeaves] = run(weights, batch, StepInputs())
    return found
