"""The kernel: one `shard_map`, in which every rank runs the ticks of a program.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards. The kernel knows
no schedule: it gives every rank its part of the program's tables, of the weights and of the batch,
and reduces once the sums that the ticks (`pipeline.core.step.run.ticks`) leave. There are four
entry points: `train`, `evaluate`, `outputs` and `logprobs`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from collectives import STAGE, vary
from pipeline.base.added import Adding
from pipeline.base.axes import axes_in
from pipeline.base.masks import Mask, Way, chosen
from pipeline.base.rows import BatchPart
from pipeline.base.tree import Leaves, Tree, is_float, partition, real
from pipeline.core.autodiff.jaxpr.primitives import makes_ref
from pipeline.core.model.loss import mean_of
from pipeline.core.model.microbatch import cut, dealt
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.fit import ModelWarning, outside
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import (
    constrain,
    defer_reduction,
    gather,
    kernel_spec,
)
from pipeline.core.step.calls.activations import Activations, follow
from pipeline.core.step.calls.ends import ends_usage
from pipeline.core.step.calls.groups import GroupedModel, make_local_model
from pipeline.core.step.calls.held import Held, Usage
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.outputs import check_outputs
from pipeline.core.step.calls.state import RankState
from pipeline.core.step.casts import cast_once
from pipeline.core.step.effects import check_effects, check_permutes
from pipeline.core.step.jitted import PerPlan
from pipeline.core.step.results import (
    Gradients,
    Kept,
    calls_of,
    divide,
    gradients_of,
    input_gradients,
    loss_and_metrics,
    outputs_of,
    own_logits_of,
    state_after,
    totals_of,
)
from pipeline.core.step.run.actions import Row
from pipeline.core.step.run.grouped import make_actions
from pipeline.core.step.run.straight import Straight
from pipeline.core.step.run.ticks import run_ticks, was_sent
from pipeline.core.step.share import check_outputs_are_final, find_share
from pipeline.core.step.stores.device import Memory, StepRequest
from pipeline.core.step.stores.windows import Windows
from schedules.lowering.needs import without
from schedules.lowering.program import COMMON, Program


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
) -> tuple[Any, Gradients, Leaves, Kept]:
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
    if plan.schedule.num_slices > 1:  # gradients of earlier slices come with those of inputs
        ways = tuple(dataclasses.replace(way, x=True) for way in ways)
    program = without(plan.training, [way.x for way in ways])
    of_inputs = _input_specs(batch) if want_inputs else []
    reaches = want_inputs or model.trained.embed

    def body(tables: Row, weights: Weights, batch: Batch, scale: Any) -> Any:
        scale, of_added = scale if isinstance(scale, tuple) else (scale, scale)
        added_share = 1 if of_added is None else of_added.astype(real())
        state = dataclasses.replace(
            rank_state(plan, model, weights, batch), added_share=added_share / calls_of(plan)
        )
        made = _prepare(plan, state, ways, reaches=reaches)
        share = find_share(made.local, plan, is_mean=made.is_mean, scaled=scale is not None)
        made = _writing(made, plan, training=True)
        if share.mean is not None:
            check_outputs_are_final(made.local)
            made = made.changed(mean=share.mean)
        plan.lint.whole(plan, made, training=True, unread=normalise)
        # Where the share is known, gradients of the mean are summed, else those of the sum.
        known = share.known if normalise else None
        factor: Any = 1.0 if known is None else known
        if scale is not None:
            factor = scale.astype(real()) * factor
        step = StepRequest(
            training=True,
            take_loss=True,
            want_inputs=want_inputs,
            masked=plan.is_masked,
            loss_share=factor,
        )
        memory = _train(made.local, plan, program, tables, step, by_table=runs is not None)
        totals = totals_of(memory, plan)
        value = totals.loss
        if known is not None:
            is_plain = scale is None and share.is_mean
            value = value / totals.weight if is_plain else mean_of(value, totals.weight)[0]
        elif normalise:
            value, divisor = mean_of(value, totals.weight)
            divide(memory, divisor)
        grads = gradients_of(memory, model, weights, plan)
        inputs = input_gradients(memory, plan, of_inputs)
        value = loss_and_metrics(made.local, plan, memory, totals, value, is_mean=share.is_mean)
        return value, grads, inputs, state_after(made.local, weights, plan, training=True)

    layout, trained = model.layout, model.trained
    specs = (
        tuple(map(_gradient_specs, layout.chunks, trained.chunks)),
        _gradient_specs(layout.ends, trained.ends),
    )
    out_specs = P(), _manual(plan, specs), of_inputs, _manual(plan, model.state_specs)
    run = run_on_ranks(plan, model, program, body, out_specs, runs)
    loss, grads, inputs, kept = run(weights, batch, scale)
    pairs = zip(inputs, of_inputs, strict=True)
    inputs = [_in_order(plan, leaf, spec, back=True) for leaf, spec in pairs]
    if inputs and plan.schedule.num_slices > 1:  # of one entry in all slices they are a sum
        whole = zip(inputs, partition(batch.inputs)[0], strict=True)
        inputs = [g if g.shape == x.shape else g.sum(1, keepdims=True) for g, x in whole]
    if plan.auto_axes:
        grads = constrain(grads, specs, plan.mesh)
    return loss, grads, inputs, kept


@PerPlan
def evaluate(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_share: bool = False
) -> tuple[Any, Kept]:
    """Run forward actions: the loss, or (loss, metrics), on every rank, and declared state.

    With ``want_share`` these come with the share of a microbatch, to multiply gradients of sums
    with, and the step counts as one that trains.
    """

    def results(made: Prepared, memory: Memory) -> Any:
        totals = totals_of(memory, plan)
        value, share = mean_of(totals.loss, totals.weight)
        found = loss_and_metrics(made.local, plan, memory, totals, value, is_mean=made.is_mean)
        return (found, share) if want_share else found

    step = StepRequest(training=False, take_loss=True)
    return _infer(plan, model, weights, batch, step, results, P(), training=want_share)


@PerPlan
def outputs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, Kept]:
    """Run forward actions: [N, ...] outputs on every rank, and declared state."""
    given, lie = (plan, model, weights, batch), plan.axes.output_spec
    step = StepRequest(training=False, take_loss=False)
    if "head" in plan.shared:  # of each row, every rank has the logits of its words
        own = lambda _, memory: own_logits_of(memory, plan)  # noqa: E731
        found, kept = _infer(*given, step, own, P(STAGE, *lie))
        found = jnp.moveaxis(found, 0, -1)[..., : model.tables.head_words]
        return _in_order(plan, found, lie, back=True), kept
    found = _infer(*given, step, lambda _, memory: outputs_of(memory, plan), lie)
    return _ordered_outputs(found, plan)


@PerPlan
def logprobs(plan: Plan, model: Model, weights: Weights, batch: Batch) -> tuple[Tree, Kept]:
    """Run forward actions: [N, ...] float32 log-probabilities of targets, and declared state."""
    given, lie = (plan, model, weights, batch), plan.axes.output_spec
    step = StepRequest(training=False, take_loss=False, logprobs=True)
    found = _infer(*given, step, lambda _, memory: outputs_of(memory, plan), lie)
    return _ordered_outputs(found, plan)


def _ordered_outputs(results: tuple[Tree, Kept], plan: Plan) -> tuple[Tree, Kept]:
    """Outputs with their positions in order."""
    found, kept = results
    spec = plan.axes.output_spec
    return jax.tree.map(lambda x: _in_order(plan, x, spec, back=True), found), kept


def _infer(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    step: StepRequest,
    results: Callable[[Prepared, Memory], Any],
    spec: P,
    *,
    training: bool = False,
) -> tuple[Any, Kept]:
    """Run forward actions; returns the results of their memory, and declared state.

    Args:
      plan: the options of the pipeline.
      model: the user's model.
      weights: [S, ...] leaves of chunks, and leaves of the ends.
      batch: [N, ...] leaves.
      step: what is wanted.
      results: makes the results.
      spec: of these.
      training: whether the step counts as one that trains.
    """
    ways = model.trained.ways(want_inputs=False, backward=False)

    def body(tables: Row, weights: Weights, batch: Batch, _: None) -> tuple[Any, Kept]:
        state = rank_state(plan, model, weights, batch)
        made = _prepare(plan, state, ways, take_loss=step.take_loss)
        if step.take_loss:
            made = made.changed(counts=True)
        elif not step.logprobs:
            check_outputs(made.local, made.local.state)
        made = _writing(made, plan, training=training, take_loss=step.take_loss)
        plan.lint.whole(plan, made, training=training)
        check_effects(made.local, again=False, masked=plan.is_masked)
        actions = make_actions(made.local, plan.forward, step)
        run_ticks(actions, plan.forward, tables, masked=plan.is_masked)
        kept = state_after(made.local, weights, plan, training=training)
        return results(made, actions.memory), kept

    out_specs = spec, _manual(plan, model.state_specs)
    return cast(
        "tuple[Any, Kept]",
        run_on_ranks(plan, model, plan.forward, body, out_specs)(weights, batch),
    )


# --- the rank's model ---


@dataclass(frozen=True, eq=False)
class Prepared:
    """A rank's model, and facts that were found by tracing it.

    Attributes:
      local: the rank's part of the model.
      activations: the types between its stages.
      ways: [K] how far each stage's backward goes.
      is_mean: whether every microbatch's loss is a mean.
      ends_body: the jaxpr of embed, head and loss; None if no loss is taken.
      adding: losses that embed and head add, by name.
      usage: for each kind of stage, the declared state that it writes.
      usage_of_ends: that embed, head and loss write; None where none is declared.
    """

    local: LocalModel
    activations: Activations
    ways: Sequence[Way]
    is_mean: bool = False
    ends_body: Any = None
    adding: Mapping[str, Adding] = field(default_factory=dict)
    usage: Sequence[tuple[LocalModel, Usage]] = ()
    usage_of_ends: Usage | None = None

    def changed(self, **fields: Any) -> Prepared:
        """A rank's model with other fields of its state."""
        state = dataclasses.replace(self.local.state, **fields)
        local = make_local_model(state, self.activations, self.ways)
        return dataclasses.replace(self, local=local)


def _prepare(
    plan: Plan,
    state: RankState,
    ways: Sequence[Way],
    *,
    take_loss: bool = True,
    reaches: bool = True,
) -> Prepared:
    """Trace the parts of a rank's model.

    Args:
      plan: the options of the pipeline.
      state: the rank's arrays.
      ways: [K] how far each stage's backward goes.
      take_loss: whether a loss is taken.
      reaches: whether gradients go back to embed.

    Raises:
      ValueError: a head adds losses that all ranks share, or an embed that no gradient reaches.
    """
    state, activations = follow(state)
    plan.lint.parts(plan, state, activations, take_loss=take_loss)
    state = cast_once(state, activations.bodies)
    _check_meetings(plan, activations.bodies)
    made = Prepared(make_local_model(state, activations, ways), activations, ways)
    if not take_loss:
        return made
    is_mean, body, of_embed, of_head = made.local.loss_is_mean()
    embed_adds, head_adds = of_embed.is_used, of_head.is_used
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
    changes: dict[str, Any] = {"has_refs": True} if makes_ref(body) else {}
    if embed_adds or head_adds:
        changes |= {"adding_ends": True, "adding_embed": embed_adds}
    adding = {"embed": of_embed, "the head": of_head}
    made = dataclasses.replace(made, is_mean=is_mean, ends_body=body, adding=adding)
    return made.changed(**changes) if changes else made


def _check_meetings(plan: Plan, bodies: Sequence[Any]) -> None:
    """Check that ranks whose devices meet in a collective of a stage run the same action."""
    if plan.schedule.num_ranks > 1 and not plan.partners and not plan.is_masked:
        check_permutes(bodies)


def _writing(made: Prepared, plan: Plan, *, training: bool, take_loss: bool = True) -> Prepared:
    """The rank's model with the declared state that a step writes, if it writes any."""
    local = made.local
    model = local.model
    if not model.declared.is_anything:
        return made
    kinds: list[tuple[Sequence[int], LocalModel]] = [(range(len(model.stages)), local)]
    if isinstance(local, GroupedModel):
        kinds = [(group.stages, group.local) for group in local.groups]
    found: dict[int, Usage] = {}
    of_kinds = []
    for stages, stage in kinds:
        usage = stage.stage_usage()
        found |= dict.fromkeys(stages, usage)
        of_kinds.append((stage, usage))
    usages = [found[k] for k in range(len(found))]
    ends = ends_usage(local.state, local.output, take_loss=take_loss)
    made = dataclasses.replace(made, usage=of_kinds, usage_of_ends=ends)
    hook = plan.after_step is not None and training
    if not (hook or any(ends[0]) or any(any(written) for written, _ in usages)):
        return made
    plan.compiled.writes.add((model.stages, model.ends))
    count = plan.schedule.num_units
    return made.changed(held=Held(local.state, usages, ends, count, again=training))


def _train(
    local: LocalModel,
    plan: Plan,
    program: Program,
    tables: Row,
    step: StepRequest,
    *,
    by_table: bool,
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
    if plan.remat == "gathered" and not actions.memory.residuals.gathers:
        _warn_of_nothing_to_gather(plan.compiled.warned)
    halves = actions.memory.halves
    plan.facts.unsplit = tuple(halves.whole) if halves else ()
    run_ticks(actions, program, tables, masked=plan.is_masked)
    return actions.memory


def _warn_of_nothing_to_gather(warned: set[Any]) -> None:
    """Warn, once, that ``remat="gathered"`` is ``remat=None`` here."""
    key = "gathered"
    if key in warned:
        return
    warned.add(key)
    warnings.warn(
        "remat='gathered' gathers nothing again: of what a stage's backward reads, nothing is the "
        "result of an all-gather outside of its loops, so residuals are kept as with remat=None; "
        "for sequence parallel layers in a mesh with tensor ranks call blocks in a Python loop, "
        "not in a scan; otherwise give remat=None",
        category=ModelWarning,
        stacklevel=outside(),
    )


# --- the shard_map ---


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
    found = {name: jnp.asarray(table) for name, table in program.rank_tables.items()}
    if runs is not None:
        found["op"] = jnp.where(runs, found["op"], 0)
        sent = was_sent(program, runs)
        found["arrival"] = jnp.where(sent, found["arrival"], program.values["operand"].discard)
    tables = {name: jnp.moveaxis(table, 2, 0) for name, table in found.items()}
    of_tables = dict.fromkeys(tables, P(STAGE))
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
        of_tables |= dict.fromkeys(COMMON, P())

    def run(weights: Weights, batch: Batch, same: Tree = None) -> Any:
        layout, batch = model.layout, _dealt(plan, batch)
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


def _dealt(plan: Plan, batch: Batch) -> Batch:
    """The batch with its positions in the order in which a position axis is to split slices."""
    if plan.schedule.num_slices == 1 or not plan.axes.positions:
        return batch
    specs = [spec for of in batch.specs for spec in of]
    leaves, treedef = jax.tree.flatten(batch)
    found = [_in_order(plan, leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(treedef, found)


def _in_order(plan: Plan, leaf: Any, spec: P | None, *, back: bool = False) -> Any:
    """A leaf whose dim 1 is split by a spec, in the order of slices; or back in its own."""
    ranks = plan.axes.size(axes_in(spec[1])) if spec is not None and len(spec) > 1 else 1
    if plan.schedule.num_slices == 1 or ranks == 1:
        return leaf
    return dealt(leaf, plan.schedule.num_slices, ranks, plan.lengths, back=back)


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
    """Make a rank's state from its shard.

    With ``num_microbatches``, of a run beside the schedule, sequences are whole.
    """
    layout, rests = model.layout, (_squeeze(weights.chunks_rest), weights.ends_rest)

    def whole(tree: Tree, spreads: Any, lead: int) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, gather(leaves, spreads, lead=lead))

    chunks = _squeeze(weights.chunks)
    parts: tuple[Leaves, ...] = ()
    if plan.gather == "step":
        stored = tuple(map(jax.tree.leaves, chunks))
        chunks = tuple(
            whole(c, spreads, 1) for c, spreads in zip(chunks, layout.chunks, strict=True)
        )
        pairs = zip(stored, map(jax.tree.leaves, chunks), strict=True)
        if any(part is not leaf for pair in pairs for part, leaf in zip(*pair, strict=True)):
            parts = stored
    chunks = tuple(map(defer_reduction, chunks, layout.chunks))
    ends = defer_reduction(whole(weights.ends, layout.ends, 0), layout.ends)
    local = Weights(chunks, ends, *rests)
    slices = 1 if num_microbatches else plan.schedule.num_slices
    num_microbatches = num_microbatches or plan.schedule.num_microbatches
    axes = plan.axes.varying

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])
        return x if slices == 1 else cut(x, slices, plan.lengths)

    local, batch = vary(local, axes), vary(batch.map_rows(split, lambda x: x), axes)
    gathers = plan.gather != "step"
    windows = Windows() if plan.has_windows else None
    sliced: dict[str, Any] = {"num_slices": slices}
    if slices > 1 and plan.lengths:
        sliced |= {"lengths": plan.lengths, "part": plan.lengths.index(max(plan.lengths))}
    given: dict[str, Any] = {"gathers": gathers, "windows": windows, "parts": parts, **sliced}
    part = BatchPart(plan.axes.rows, plan.axes.positions, slices)
    state = RankState(model, local, batch, axes, **given, batch_part=part)
    units = num_microbatches * slices
    return state.with_padding(units, units * plan.axes.num_parts)


def _squeeze(tree: Tree) -> Tree:
    """Drop the leading axis of length 1 that a sharded [S, ...] leaf has on its rank."""
    return jax.tree.map(lambda x: x[0], tree)
