"""The results of a step: its sums become loss, metrics, gradients, outputs and state.

Letters: S ranks, M microbatches, b rows of a microbatch on one data shard. Every function runs on
all ranks, after the last tick, and reduces over mesh axes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from collectives import STAGE
from pipeline.base.axes import axes_in
from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import Leaves, Tree, as_numbers, numbers_as, shape_text
from pipeline.core.model.loss import Weighed, mean_of
from pipeline.core.model.model import Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import total_over, totals_over
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.calls.rank import LossScale
from pipeline.core.step.stores.loops import scale_in_place
from pipeline.core.step.stores.totals import StepSums, Total

StateLeaves = tuple[list[Leaves], Leaves]  # declared state: of each chunk, and of the ends
Totals = tuple[jax.Array, jax.Array, Leaves]  # loss and weight, scalars; scalars of the metrics
Gradients = tuple[tuple[Leaves, ...], Leaves]  # of each chunk, and of the ends


def calls_of(plan: Plan) -> int:
    """Count the calls of the loss in a step: M times N slices times parts of rows and positions."""
    return plan.schedule.num_units * plan.axes.num_parts


def totals_of(sums: StepSums, plan: Plan) -> Totals:
    """Sum loss, weight and the scalars of the metrics over all calls of a step."""
    names = "loss", "weight", "metrics"
    scalars = [x for name in names for x in sums.scalars[name].all()]
    loss, weight, *measured = total_over(scalars, plan.axes.varying)
    return loss, weight, measured


def training_results(
    step: OpenedStep, sums: StepSums, weights: Weights, of_inputs: Sequence[PartitionSpec]
) -> tuple[Any, Gradients, Leaves, StateLeaves]:
    """Compute the results of a training step, as `pipeline.core.step.runtime.train` returns them.

    Args:
      of_inputs: the specs of the inputs' float leaves.
    """
    totals = totals_of(sums, step.plan)
    value = step_loss(sums, totals, step.rank.loss, normalise=step.request.normalise)
    grads = gradients_of(sums, step.rank.model, weights, step.plan)
    inputs = input_gradients(sums, step.plan, of_inputs)
    value = loss_and_metrics(step, sums, totals, value)
    return value, grads, inputs, state_after(step, weights)


def evaluation_results(step: OpenedStep, sums: StepSums) -> Any:
    """Compute the loss of an evaluation, as `pipeline.core.step.runtime.evaluate` returns it."""
    totals = totals_of(sums, step.plan)
    value, share = mean_of(*totals[:2])
    loss = loss_and_metrics(step, sums, totals, value)
    return (loss, share) if step.request.counts else loss


def loss_and_metrics(step: OpenedStep, sums: StepSums, totals: Totals, value: jax.Array) -> Any:
    """Return the caller's loss, with the losses that stages add, and perhaps metrics.

    Args:
      value: the loss without added losses.
    """
    plan, rank, (_, weight, measured) = step.plan, step.rank, totals
    # Added losses are means over all calls; the weight of the loss does not affect them.
    for added in total_over(sums.added.all(), plan.axes.varying):
        value += added.astype(value.dtype) / calls_of(plan)
    loss: Any = value
    counted, (_, metrics) = None, step.metrics
    if rank.model.weighed:
        batch = rank.batch
        # In an average over batches, a loss that is a mean is weighted by its rows, any other loss
        # by its weight.
        rows = jax.tree.leaves((batch.inputs, batch.targets))[0].shape[1]  # of a microbatch
        # Every call had weight 1, also the call for each slice and for each part of the positions.
        share = rows / (plan.axes.num_positions * plan.schedule.num_slices)
        counted = weight * share if rank.loss.is_mean else weight
        loss = Weighed(value, counted)
    if metrics is None:
        return loss
    return loss, metrics.of(measured, weight, counted)


def step_loss(sums: StepSums, totals: Totals, scale: LossScale, *, normalise: bool) -> jax.Array:
    """Compute the loss without added losses; divide gradients if the loss's weight was unknown.

    Args:
      normalise: whether the loss is a mean over the step; else it is a sum.
    """
    loss, weight, _ = totals
    # The gradients are already gradients of the mean. With a caller's scale, or a weight that may
    # be 0, the loss is divided by `mean_of`, as the share was.
    if scale.share is not None:
        is_plain = scale.of_caller is None and scale.is_mean
        return loss / weight if is_plain else mean_of(loss, weight)[0]
    if not normalise:
        return loss
    # The weight was unknown until now: divide all gradients once, in place.
    value, divisor = mean_of(loss, weight)
    divide(sums, divisor)
    return value


def divide(sums: StepSums, factor: jax.Array) -> None:
    totals = (*sums.chunk_grads, sums.ends_grads)
    for refs in (*(total.results for total in totals), sums.input_grads.refs):
        scale_in_place(refs, factor)


def gradients_of(sums: StepSums, model: Model, weights: Weights, plan: Plan) -> Gradients:
    """Return the gradients of trained parameters, summed over ranks, in the parameters' dtypes."""

    def reduced(
        total: Total, like: Tree, spreads: Any, mask: Mask, axes: tuple[str, ...], lead: int = 0
    ) -> Leaves:
        # Gradients are summed over row and position axes once, here, not once per microbatch.
        summed = total.reduced(chosen(spreads, mask), axes, lead=lead)
        leaves = chosen(jax.tree.leaves(like), mask)
        return [g.astype(w.dtype) for g, w in zip(summed, leaves, strict=True)]

    # A chunk's gradients belong to one rank of `stage`, so they are summed only over the parts of
    # the batch, and get back the leading axis that `shard_map` joins. Ends are replicated over
    # `stage`: ranks that do not run them have added zeros.
    layout, trained, split = model.layout, model.trained, plan.axes.split
    of_chunks = zip(sums.chunk_grads, weights.chunks, layout.chunks, trained.chunks, strict=True)
    chunks = tuple([g[None] for g in reduced(*arguments, split, lead=1)] for arguments in of_chunks)
    of_ends = sums.ends_grads, weights.ends, layout.ends, trained.ends
    return chunks, reduced(*of_ends, plan.axes.varying)


def input_gradients(sums: StepSums, plan: Plan, specs: Sequence[PartitionSpec]) -> Leaves:
    """Return [M * b, ...] gradients of the inputs' float leaves, which have these specs."""
    # For an input that a position axis does not split, each rank of the axis has one term of the
    # gradient.
    over = [(STAGE, *plan.axes.missing_in(spec)) for spec in specs]
    return [_joined(x, plan) for x in totals_over(sums.input_grads.all(), over)]


def outputs_of(sums: StepSums, plan: Plan) -> Tree:
    """Return [M * b, ...] outputs of an inference, on every rank."""
    # Only the last rank has written results; the other ranks hold zeros. Flags are summed as
    # numbers.
    results, slices = sums.results.all(), plan.schedule.num_slices
    _check_positions(results, plan.axes.output_spec)
    _check_sliced(results, slices)
    total = total_over(jax.tree.map(as_numbers, results), (STAGE,))
    return jax.tree.map(lambda like, x: _joined(numbers_as(like, x), plan), results, total)


def own_logits_of(sums: StepSums, plan: Plan) -> jax.Array:
    """Return [n, M * b, ...] logits of this rank's n words, for a head that all ranks share."""
    return jnp.moveaxis(_joined(sums.results.all(), plan), -1, 0)


def join_logits(logits: jax.Array, model: Model) -> jax.Array:
    """Return [M * b, ..., words] logits from the [S n, M * b, ...] logits of all ranks."""
    return jnp.moveaxis(logits, 0, -1)[..., : model.tables.head_words]


def state_after(step: OpenedStep, weights: Weights) -> StateLeaves:
    # A step that writes no state returns its old state, so that the results always have one type.
    plan, state, declared = step.plan, step.rank.declared, step.rank.model.declared
    if state is not None:
        hook = plan.after_step if step.request.counts else None
        chunks, ends = state.finish(plan.axes.split, hook)
        return [[x[None] for x in of] for of in chunks], ends
    rests, ends = map(jax.tree.leaves, weights.chunks_rest), jax.tree.leaves(weights.ends_rest)
    chunks = [[of[n] for n in n_of] for of, n_of in zip(rests, declared.chunk_cells, strict=False)]
    return chunks, [ends[n] for n in declared.ends_cells]


def _joined(x: jax.Array, plan: Plan) -> jax.Array:
    """Join [M, b, ...] to [M * b, ...]; with N slices, join [M N, b, t, ...] to [M * b, T, ...]."""
    N = plan.schedule.num_slices
    # Units of shorter slices are padded to the longest: crop each before joining them.
    if plan.lengths and N > 1:
        most, size = max(plan.lengths), x.shape[2]
        lengths = [whole * size // most if size > 1 else 1 for whole in plan.lengths]
        parts = [x[n::N, :, :length] for n, length in enumerate(lengths)]
        x = jnp.concatenate(parts, axis=2)
    elif N > 1:
        x = x.reshape(-1, N, *x.shape[1:])
        x = jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1, *x.shape[4:])
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _check_positions(results: Tree, spec: PartitionSpec) -> None:
    """Raise ValueError unless outputs have the dims that position axes split.

    Outputs are joined along these dims; without them, ranks might have different values.

    Args:
      results: [M, b, ...] leaves of one rank.
    """
    for leaf in jax.tree.leaves(results):
        if leaf.ndim - 1 < len(spec):
            raise ValueError(
                f"outputs have {leaf.ndim - 1} dims, {shape_text(leaf)} of all microbatches on one "
                f"device, and batch= splits dim {len(spec) - 1} over "
                f"{' x '.join(map(repr, axes_in(spec[-1])))}: outputs are joined along it; return "
                f"[rows, positions, ...], or take what is reduced over positions as a loss or a "
                f"metric of loss_fn (has_aux=True)"
            )


def _check_sliced(results: Tree, num_slices: int) -> None:
    """Raise ValueError unless the outputs of slices have positions, along which they are joined."""
    for leaf in jax.tree.leaves(results):
        if num_slices > 1 and leaf.ndim < 3:
            raise ValueError(
                f"outputs of slices={num_slices} are {shape_text(leaf)} of all slices on one "
                f"device, without a dim of positions after their rows: slices are joined along it; "
                f"return [rows, positions, ...], or compute values that are reduced over positions "
                f"as a loss or a metric of loss_fn (has_aux=True)"
            )
