"""The kernel: one `shard_map`, in which every rank runs the ticks of a program.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards. The kernel knows
no schedule: it gives every rank its part of the program's tables, of the weights and of the batch,
and reduces once what the ticks (`pipeline.core.kernel.ticks`) have added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collectives import STAGE, vary
from pipeline.base.masks import Mask, Way, chosen
from pipeline.base.tree import Leaves, Tree, as_numbers, is_float, numbers_as, real
from pipeline.core.diagnosis.effects import check_effects, check_permutes
from pipeline.core.diagnosis.unread import (
    warn_of_nothing_to_gather,
    warn_of_parameters_that_nobody_reads,
)
from pipeline.core.jaxpr.primitives import makes_ref
from pipeline.core.kernel.actions import Row
from pipeline.core.kernel.grouped import make_actions
from pipeline.core.kernel.jitted import PerPlan
from pipeline.core.kernel.memory import Memory, Step, scale_in_place
from pipeline.core.kernel.straight import Straight
from pipeline.core.kernel.ticks import run_ticks, was_sent
from pipeline.core.model.loss import Weighed, mean_of
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.rank.activations import Activations, follow
from pipeline.core.rank.ends import ends_usage
from pipeline.core.rank.groups import GroupedModel, make_local_model
from pipeline.core.rank.held import Held, Usage
from pipeline.core.rank.local_model import LocalModel
from pipeline.core.rank.outputs import check_outputs, check_positions
from pipeline.core.rank.state import RankState
from pipeline.core.sharding.placement import Spread
from pipeline.core.sharding.zero import (
    constrain,
    defer_reduction,
    gather,
    kernel_spec,
    reduce_gradients,
    total_over,
    totals_over,
)
from schedules.lowering.needs import without
from schedules.lowering.program import COMMON, Program

Kept = tuple[list[Leaves], Leaves]  # declared state: of each chunk, and of the ends
FIELDS = ("op", "microbatch", "operand", "gradient", "stash", "crossing", "arrival")


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
) -> tuple[Any, tuple[tuple[Leaves, ...], Leaves], Leaves, Kept]:
    """Run a schedule, forward and backward.

    Args:
      plan: the options of the pipeline, static.
      model: the user's model, static.
      weights: [S, ...] leaves of chunks, and leaves of the ends.
      batch: [N, ...] leaves.
      scale: what the loss is multiplied with before it is differentiated, a scalar; if it is not
        normalised a pair, of what sums are multiplied with, and the mean of added losses.
      runs: [T, slots, S] which entries of the program's table run, to time them; others are idle,
        and what they would have sent does not arrive.
      want_inputs: whether to return gradients for the inputs.
      normalise: divide by the total weight of the loss.

    Returns:
      The loss, a float32 scalar that is not scaled, or (loss, metrics) if metrics are wanted, each
      `Weighed` if the model says so; gradients for those leaves of ``weights.chunks`` and of
      ``weights.ends`` that are trained; for the inputs' float leaves, [N, ...]; and declared state
      as the step has left it.
    """
    ways = model.trained.ways(want_inputs=want_inputs)
    program = without(plan.training, [way.x for way in ways])
    of_inputs = _input_specs(batch) if want_inputs else []

    def body(tables: Row, weights: Weights, batch: Batch, scale: Any) -> Any:
        scale, of_added = scale if isinstance(scale, tuple) else (scale, scale)
        calls = plan.schedule.num_microbatches * plan.axes.num_parts
        state = rank_state(plan, model, weights, batch)
        added_share = 1 / calls if of_added is None else of_added.astype(real()) / calls
        state, activations = _followed(plan, dataclasses.replace(state, added_share=added_share))
        reaches = want_inputs or model.trained.embed
        local, is_mean, ends_body = _with_loss(plan, state, activations, ways, reaches=reaches)
        mean, known = _known_before(local, plan, is_mean=is_mean, scaled=scale is not None)
        local = _writing(local, activations, plan, ways, training=True)
        if mean is not None:
            _check_outputs_are_final(local)
            state = dataclasses.replace(local.state, mean=mean)
            local = make_local_model(state, activations, ways)
        known = known if normalise else None
        if normalise:
            bodies, warned = activations.bodies, plan.compiled.warned
            warn_of_parameters_that_nobody_reads(local.state, bodies, ends_body, warned)
        share: Any = 1.0 if known is None else known
        if scale is not None:
            share = scale.astype(real()) * share
        step = Step(
            training=True,
            take_loss=True,
            want_inputs=want_inputs,
            masked=plan.is_masked,
            loss_share=share,
        )
        sums = _train(local, plan, program, tables, step, by_table=runs is not None)
        total, weight, *measured = total_over(_of_loss(sums), plan.axes.varying)
        value = total
        if normalise and known is None:
            value, share = mean_of(total, weight)
            for totals in (*sums.chunk_grads, sums.ends_grads, sums.input_grads):
                scale_in_place(totals.refs, share)

        def gradients(
            totals: Any, like: Tree, spreads: Any, mask: Mask, axes: tuple[str, ...], lead: int = 0
        ) -> Leaves:
            # Over row and position axes once, here, and not once per microbatch.
            summed = reduce_gradients(totals.all(), chosen(spreads, mask), axes, lead=lead)
            leaves = chosen(jax.tree.leaves(like), mask)
            return [g.astype(w.dtype) for g, w in zip(summed, leaves, strict=True)]

        chunks = tuple(
            [g[None] for g in gradients(totals, params, spreads, mask, plan.axes.split, lead=1)]
            for totals, params, spreads, mask in zip(
                sums.chunk_grads,
                weights.chunks,
                model.layout.chunks,
                model.trained.chunks,
                strict=True,
            )
        )
        ends = gradients(
            sums.ends_grads,
            weights.ends,
            model.layout.ends,
            model.trained.ends,
            plan.axes.varying,
        )
        # Of an input that is whole over a position axis each rank there has an addend.
        over = [(STAGE, *plan.axes.missing_in(spec)) for spec in of_inputs]
        inputs = list(map(_unsplit, totals_over(sums.input_grads.all(), over)))
        if known is not None:
            is_plain = scale is None and is_mean
            value = total / weight if is_plain else mean_of(total, weight)[0]
        value = _with_metrics(
            local, plan, _with_added(sums, value, plan), weight, measured, is_mean=is_mean
        )
        return value, (chunks, ends), inputs, _kept(local, weights, plan, training=True)

    layout, trained = model.layout, model.trained
    specs = (
        tuple(map(_gradient_specs, layout.chunks, trained.chunks)),
        _gradient_specs(layout.ends, trained.ends),
    )
    out_specs = P(), _manual(plan, specs), of_inputs, _manual(plan, model.state_specs)
    run = run_on_ranks(plan, model, program, body, out_specs, runs)
    loss, grads, inputs, kept = run(weights, batch, scale)
    if plan.auto_axes:
        grads = constrain(grads, specs, plan.mesh)
    return loss, grads, inputs, kept


def _followed(plan: Plan, state: RankState) -> tuple[RankState, Activations]:
    """As `follow`, with a check of where the devices of stages meet."""
    state, activations = follow(state)
    _check_meetings(plan, activations.bodies)
    return state, activations


def _check_meetings(plan: Plan, bodies: Sequence[Any]) -> None:
    """Check that ranks whose devices meet in a collective of a stage run the same action."""
    if plan.schedule.num_ranks > 1 and not plan.partners and not plan.is_masked:
        check_permutes(bodies)


def _writing(
    local: LocalModel,
    activations: Activations,
    plan: Plan,
    ways: Sequence[Way],
    *,
    training: bool,
    take_loss: bool = True,
) -> LocalModel:
    """The rank's model with the declared state that a step writes, if it writes any."""
    held = _make_held(local, plan, training=training, take_loss=take_loss)
    if held is None:
        return local
    return make_local_model(dataclasses.replace(local.state, held=held), activations, ways)


def _make_held(
    local: LocalModel, plan: Plan, *, training: bool, take_loss: bool = True
) -> Held | None:
    """The declared state that a step writes; None if it writes none."""
    model = local.model
    if not model.declared.is_anything:
        return None
    if isinstance(local, GroupedModel):
        found: dict[int, Usage] = {}
        for group in local.groups:
            found |= dict.fromkeys(group.stages, group.local.stage_usage())
        usages = [found[k] for k in range(len(found))]
    else:
        usages = [local.stage_usage()] * len(model.stages)
    ends = ends_usage(local.state, local.output, take_loss=take_loss)
    hook = plan.after_step is not None and training
    if not (hook or any(ends[0]) or any(any(written) for written, _ in usages)):
        return None
    plan.compiled.writes.add((model.stages, model.ends))
    count = plan.schedule.num_microbatches
    return Held(local.state, usages, ends, count, again=training)


def _kept(local: LocalModel, weights: Weights, plan: Plan, *, training: bool) -> Kept:
    """Declared state behind a step, as it is returned."""
    held, declared = local.state.held, local.model.declared
    if held is not None:
        hook = plan.after_step if training else None
        chunks, ends = held.finish(plan.schedule, plan.axes.split, hook)
        return [[x[None] for x in of] for of in chunks], ends
    rests, ends = map(jax.tree.leaves, weights.chunks_rest), jax.tree.leaves(weights.ends_rest)
    chunks = [[of[n] for n in n_of] for of, n_of in zip(rests, declared.chunk_cells, strict=False)]
    return chunks, [ends[n] for n in declared.ends_cells]


def _with_metrics(
    local: LocalModel,
    plan: Plan,
    value: jax.Array,
    weight: jax.Array,
    measured: Leaves,
    *,
    is_mean: bool,
) -> Any:
    """A step's loss, and its metrics if they are wanted, of sums over all microbatches."""
    loss: Any = value
    counted, (_, metrics) = None, local.metrics
    if local.model.weighed:
        batch = local.batch
        rows = jax.tree.leaves((batch.inputs, batch.targets))[0].shape[1]  # of a microbatch
        # Each part of the positions has counted the rows.
        counted = weight * (rows / plan.axes.num_positions) if is_mean else weight
        loss = Weighed(value, counted)
    return loss if metrics is None else (loss, metrics.of(measured, weight, counted))


def _of_loss(sums: Memory) -> Leaves:
    """The sums of the loss, of its weight, and those that metrics are made of."""
    return [x for name in ("loss", "weight", "metrics") for x in sums.sums[name].all()]


def _with_added(sums: Memory, value: jax.Array, plan: Plan) -> jax.Array:
    """A step's loss and the mean of what stages add to it."""
    calls = plan.schedule.num_microbatches * plan.axes.num_parts
    for added in total_over(sums.added.all(), plan.axes.varying):
        value += added.astype(value.dtype) / calls
    return value


def _with_loss(
    plan: Plan,
    state: RankState,
    activations: Activations,
    ways: Sequence[Way],
    *,
    reaches: bool = True,
) -> tuple[LocalModel, bool, Any]:
    """A rank's model, which knows what adds losses.

    Also whether its own loss is a mean, and the jaxpr of embed, head and loss.

    Raises:
      ValueError: a head adds some that all ranks share, or an embed that no gradient ``reaches``.
    """
    local = make_local_model(state, activations, ways)
    is_mean, body, embed_adds, head_adds = local.loss_is_mean()
    _check_meetings(plan, [body])
    if head_adds and "head" in plan.shared:
        raise ValueError(
            "the head calls add_loss, and all ranks share it (vocabulary='stage'), so that no one "
            "of them runs it; add the loss in the last stage, or use vocabulary='ends'"
        )
    if embed_adds and not reaches:
        raise ValueError(
            "embed calls add_loss, and wrt= trains nothing in it, so that no gradient goes back to "
            "it; train embed too, or let it add nothing"
        )
    if embed_adds or head_adds:
        state = dataclasses.replace(state, adding_ends=True, adding_embed=embed_adds)
    if makes_ref(body):
        state = dataclasses.replace(state, has_refs=True)
    if state is not local.state:
        local = make_local_model(state, activations, ways)
    return local, is_mean, body


def _known_before(local: LocalModel, plan: Plan, *, is_mean: bool, scaled: bool) -> Any:
    """The value of a loss and the factor that makes means of sums, as known before its step.

    The latter makes means of them; if it is known, no gradient need be divided after the step. Each
    is None if it is not known; the value is if the step needs it.
    """
    if is_mean:
        return None, 1 / (plan.schedule.num_microbatches * plan.axes.num_parts)
    # d(S / W) = (dS - S / W dW) / W.
    if "head" not in plan.shared and local.weight_has_gradient():
        _check_that_it_is_all(local.model)
        return _of_outputs(local, plan)
    # A scale is chosen for gradients of the mean, and those of a sum might overflow. What stages
    # add is not divided by a loss's weight, and no gradient can be afterwards.
    if not scaled and not local.state.adds:
        return None, None
    weight = local.weight_of_targets()
    if weight is None:
        return _of_outputs(local, plan) if local.state.adds else (None, None)
    return None, mean_of(jnp.zeros_like(weight), total_over(weight, plan.axes.split))[1]


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


def _check_outputs_are_final(local: LocalModel) -> None:
    """Check that what is known before the step is true of the step.

    Raises:
      ValueError: it is `_of_outputs`, of forward actions on state as it was, and the step writes
        state.
    """
    if local.state.held is not None:
        raise ValueError(
            "stages write declared state, and loss_fn's weight follows from their outputs: where "
            "it has a gradient, or stages call add_loss, a step then knows it too late; let the "
            "weight follow from targets, as the number of those that count, or declare no state"
        )


def _of_outputs(local: LocalModel, plan: Plan) -> tuple[Any, Any]:
    """As `_known_before`, where it follows from outputs: forward actions run first."""
    program, rank = plan.forward, jax.lax.axis_index(STAGE)
    tables: dict[str, Any] = {}
    for name in (*FIELDS, *(COMMON if program.shared else ())):
        table = jnp.asarray(getattr(program, name))
        own = table if name in COMMON else jnp.moveaxis(table, 2, 0)[rank][None]
        tables[name] = own
    check_effects(local, again=True, masked=plan.is_masked)
    step = Step(training=False, take_loss=True)
    actions = make_actions(local, program, step)
    run_ticks(actions, program, tables, masked=plan.is_masked)
    total, weight, *_ = total_over(_of_loss(actions.memory), plan.axes.varying)
    return mean_of(total, weight)


def _train(
    local: LocalModel, plan: Plan, program: Program, tables: Row, step: Step, *, by_table: bool
) -> Memory:
    """Run a step; returns the memory that holds what it has added up."""
    is_alike = not isinstance(local, GroupedModel)
    plan.facts.straight = plan.is_straight and is_alike and local.state.held is None
    if plan.facts.straight and not by_table:
        straight = Straight(local, plan.schedule.num_microbatches, step)
        straight.run()
        return straight.memory
    check_effects(local, again=plan.keep == "input", masked=plan.is_masked)
    actions = make_actions(local, program, step)
    if plan.remat == "gathered":
        warn_of_nothing_to_gather(actions.memory.residuals, plan.compiled.warned)
    halves = actions.memory.halves
    plan.facts.unsplit = tuple(halves.whole) if halves else ()
    run_ticks(actions, program, tables, masked=plan.is_masked)
    return actions.memory


@PerPlan
def infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    *,
    take_loss: bool,
    want_share: bool = False,
    logprobs: bool = False,
) -> tuple[Tree, Kept]:
    """Run a schedule's forward actions: the loss, or [N, ...] outputs, on every rank.

    With ``want_share`` the loss, or (loss, metrics), comes with what sums over microbatches are to
    be multiplied with, and the step counts as one that trains. With ``logprobs`` outputs are those
    of targets, [N, ...] float32. Also returns declared state as it was left.
    """

    def body(tables: Row, weights: Weights, batch: Batch, _: None) -> tuple[Tree, Kept]:
        ways = model.trained.ways(want_inputs=False, backward=False)
        state, activations = _followed(plan, rank_state(plan, model, weights, batch))
        is_mean = False
        if take_loss:
            local, is_mean, _ = _with_loss(plan, state, activations, ways)
        else:
            local = make_local_model(state, activations, ways)
            if not logprobs:
                check_outputs(local, state)
        counting = dataclasses.replace(local.state, counts=take_loss)
        local = make_local_model(counting, activations, ways)
        local = _writing(local, activations, plan, ways, training=want_share, take_loss=take_loss)
        found = outputs(local, tables, is_mean=is_mean)
        return found, _kept(local, weights, plan, training=want_share)

    def outputs(local: LocalModel, tables: Row, *, is_mean: bool) -> Tree:
        check_effects(local, again=False, masked=plan.is_masked)
        step = Step(training=False, take_loss=take_loss, logprobs=logprobs)
        actions = make_actions(local, plan.forward, step)
        run_ticks(actions, plan.forward, tables, masked=plan.is_masked)
        if take_loss:
            total, weight, *measured = total_over(_of_loss(actions.memory), plan.axes.varying)
            value, share = mean_of(total, weight)
            value = _with_added(actions.memory, value, plan)
            found = _with_metrics(local, plan, value, weight, measured, is_mean=is_mean)
            return (found, share) if want_share else found
        if shares_head and not logprobs:  # of each row, every rank has the logits of its words
            return jnp.moveaxis(_unsplit(actions.memory.results.all()), -1, 0)
        # Only the last rank has written results; all others hold zeros. A sum counts flags.
        found = actions.memory.results.all()
        check_positions(found, plan.axes.output_spec)
        total = total_over(jax.tree.map(as_numbers, found), (STAGE,))
        return jax.tree.map(lambda like, x: _unsplit(numbers_as(like, x)), found, total)

    lie, shares_head = plan.axes.output_spec, "head" in plan.shared
    specs = _manual(plan, model.state_specs)
    if shares_head and not (take_loss or logprobs):
        run = run_on_ranks(plan, model, plan.forward, body, (P(STAGE, *lie), specs))
        found, kept = run(weights, batch)
        return jnp.moveaxis(found, 0, -1)[..., : model.tables.head_words], kept
    out_specs = P() if take_loss else lie, specs
    return run_on_ranks(plan, model, plan.forward, body, out_specs)(weights, batch)


def run_on_ranks(
    plan: Plan,
    model: Model,
    program: Program,
    body: Callable[..., Any],
    out_specs: Any,
    runs: jax.Array | None = None,
) -> Any:
    """The body on every device, given its rank's tables, weights and shard of the batch.

    A last operand, if it is not None, is the same on all. ``runs`` are the entries of tables that
    are not idle, if not all.
    """
    found = {name: jnp.asarray(getattr(program, name)) for name in FIELDS}
    if runs is not None:
        found["op"] = jnp.where(runs, found["op"], 0)
        sent = was_sent(program, runs)
        found["arrival"] = jnp.where(sent, found["arrival"], program.num_buffers)
    tables = {name: jnp.moveaxis(table, 2, 0) for name, table in found.items()}
    of_tables = dict.fromkeys(FIELDS, P(STAGE))
    if program.shared:
        tables |= {name: jnp.asarray(getattr(program, name)) for name in COMMON}
        of_tables |= dict.fromkeys(COMMON, P())

    def run(weights: Weights, batch: Batch, same: Tree = None) -> Any:
        layout = model.layout
        params = _state_specs(weights.chunks, weights.ends, layout.chunks, layout.ends)
        rests = weights.chunks_rest, weights.ends_rest
        others = _state_specs(*rests, layout.chunks_rest, layout.ends_rest)
        of_weights = Weights(*_manual(plan, (*params, *others)))
        sharded = jax.shard_map(
            body,
            mesh=plan.mesh,
            in_specs=(of_tables, of_weights, batch.spec_tree(), P()),
            out_specs=out_specs,
            axis_names=plan.axes.manual,
            check_vma=plan.tracks_varying,
        )
        return sharded(tables, weights, batch, same)

    return run


def _state_specs(chunks: Tree, ends: Tree, of_chunks: Any, of_ends: Any) -> Any:
    """The specs of a state's leaves, each in the place of its leaf."""

    def one(state: Tree, spreads: Any) -> Tree:
        specs = [spread.stored for spread in spreads]
        return jax.tree.unflatten(jax.tree.structure(state), specs)

    return tuple(map(one, chunks, of_chunks)), one(ends, of_ends)


def _input_specs(batch: Batch) -> list[P]:
    """The specs of the inputs that may have gradients: of those that are floats."""
    pairs = zip(jax.tree.leaves(batch.inputs), batch.specs[0], strict=True)
    return [spec for leaf, spec in pairs if spec is not None and is_float(leaf)]


def _gradient_specs(spreads: Sequence[Spread], mask: Mask) -> list[P]:
    """The specs of the gradients of what is trained."""
    return [spread.gradient for spread in chosen(spreads, mask)]


def _manual(plan: Plan, specs: Tree) -> Tree:
    """Reduce specs to the axes that the kernel handles."""
    return jax.tree.map(lambda spec: kernel_spec(spec, plan.axes.manual), specs)


def rank_state(
    plan: Plan, model: Model, weights: Weights, batch: Batch, num_microbatches: int | None = None
) -> RankState:
    """Make a rank's state from its shard; ``num_microbatches`` if not the schedule's number."""
    layout, rests = model.layout, (_squeeze(weights.chunks_rest), weights.ends_rest)

    def whole(tree: Tree, spreads: Any, lead: int) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, gather(leaves, spreads, lead=lead))

    chunks = _squeeze(weights.chunks)
    if plan.gather == "step":
        chunks = tuple(
            whole(c, spreads, 1) for c, spreads in zip(chunks, layout.chunks, strict=True)
        )
    chunks = tuple(map(defer_reduction, chunks, layout.chunks))
    ends = defer_reduction(whole(weights.ends, layout.ends, 0), layout.ends)
    local = Weights(chunks, ends, *rests)
    num_microbatches = num_microbatches or plan.schedule.num_microbatches
    axes = plan.axes.varying

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])

    local, batch = vary(local, axes), vary(batch.map_rows(split, lambda x: x), axes)
    return RankState(model, local, batch, axes, gathers=plan.gather == "action")


def _squeeze(tree: Tree) -> Tree:
    """Drop the leading axis of length 1 that a sharded [S, ...] leaf has on its rank."""
    return jax.tree.map(lambda x: x[0], tree)


def _unsplit(x: jax.Array) -> jax.Array:
    """[M, b, ...] to [M * b, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
