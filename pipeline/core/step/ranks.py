"""The `shard_map` of a step: every rank's part of the tables, the weights and the batch.

Letters: S ranks, M microbatches, N = M * b * D rows of the batch on D data shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from collectives import STAGE, vary
from pipeline.base.axes import axes_in
from pipeline.base.masks import Mask, chosen
from pipeline.base.rows import BatchPart
from pipeline.base.tree import Leaves, Tree, is_float, partition
from pipeline.core.model.microbatch import cut, dealt
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import defer_reduction, kernel_spec
from pipeline.core.step.calls.rank import Rank, Slices
from pipeline.core.step.stores.weights import ChunkWeights, gather_ends
from schedules.lowering.program import COMMON, Program


def run_on_ranks(
    plan: Plan,
    model: Model,
    program: Program,
    body: Callable[..., Any],
    out_specs: Any,
    runs: jax.Array | None = None,
) -> Any:
    """Make the function that runs ``body`` on every device.

    The body takes its rank's tables and weights, its shard of the batch, and a last operand that is
    equal on all devices or None. ``runs``, [T, slots, S], selects the entries of tables that run,
    to time them; None selects all.
    """
    # Tables are split over `stage` only: all devices of a rank, along `data` and other axes, read
    # one row. So they take one branch, and a branch may hold collectives over these axes. It may
    # hold none over `stage`, where ranks communicate only in the exchanges after a slot.
    columns = {name: jnp.asarray(table) for name, table in program.rank_tables.items()}
    # An entry that does not run becomes idle, and its message must not be stored: the sender then
    # sends a placeholder.
    if runs is not None:
        columns["op"] = jnp.where(runs, columns["op"], 0)
        discard = program.values["operand"].discard
        columns["arrival"] = jnp.where(_was_sent(program, runs), columns["arrival"], discard)
    tables = {name: jnp.moveaxis(table, 2, 0) for name, table in columns.items()}
    of_tables = dict.fromkeys(tables, P(STAGE))
    if program.shared:
        tables |= {name: jnp.asarray(table) for name, table in program.common._asdict().items()}
        of_tables |= dict.fromkeys(COMMON, P())

    def run(weights: Weights, batch: Batch, same: Tree = None) -> Any:
        # Layouts also name mesh axes that are left to the compiler (`auto_axes`); `manual` drops
        # them.
        batch, of_weights = deal(plan, batch), manual(plan, weight_specs(model, weights))
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


def weight_specs(model: Model, weights: Weights) -> Weights:
    layout, rests = model.layout, (weights.chunks_rest, weights.ends_rest)
    params = _state_specs(weights.chunks, weights.ends, layout.chunks, layout.ends)
    others = _state_specs(*rests, layout.chunks_rest, layout.ends_rest)
    return Weights(*params, *others)


def deal(plan: Plan, batch: Batch) -> Batch:
    """Order the positions of a batch so that a position axis splits every slice."""
    if plan.schedule.num_slices == 1 or not plan.axes.positions:
        return batch
    specs = [spec for of in batch.specs for spec in of]
    leaves, treedef = jax.tree.flatten(batch)
    results = [in_order(plan, leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(treedef, results)


def in_order(plan: Plan, leaf: Any, spec: P | None, *, back: bool = False) -> Any:
    """Order dim 1 of a leaf like `deal`, if ``spec`` splits dim 1; ``back`` undoes the order."""
    ranks = plan.axes.size(axes_in(spec[1])) if spec is not None and len(spec) > 1 else 1
    if plan.schedule.num_slices == 1 or ranks == 1:
        return leaf
    return dealt(leaf, plan.schedule.num_slices, ranks, plan.lengths, back=back)


def order_inputs(plan: Plan, gradients: Leaves, specs: list[P], batch: Batch) -> Leaves:
    """Return gradients in the shapes of the inputs, with positions in the inputs' order."""
    pairs = zip(gradients, specs, strict=True)
    ordered = [in_order(plan, leaf, spec, back=True) for leaf, spec in pairs]
    if not ordered or plan.schedule.num_slices == 1:
        return ordered
    # An input with one entry for all positions was read by every slice: its gradient is the sum.
    whole = zip(ordered, partition(batch.inputs)[0], strict=True)
    return [g if g.shape == x.shape else g.sum(1, keepdims=True) for g, x in whole]


def _state_specs(chunks: Tree, ends: Tree, of_chunks: Any, of_ends: Any) -> Any:
    def specs_of(state: Tree, spreads: Any) -> Tree:
        specs = [spread.stored for spread in spreads]
        return jax.tree.unflatten(jax.tree.structure(state), specs)

    return tuple(map(specs_of, chunks, of_chunks)), specs_of(ends, of_ends)


def input_specs(batch: Batch) -> list[P]:
    """List the specs of the float inputs, which may have gradients."""
    pairs = zip(jax.tree.leaves(batch.inputs), batch.specs[0], strict=True)
    return [spec for leaf, spec in pairs if spec is not None and is_float(leaf)]


def gradient_specs(model: Model) -> tuple[tuple[list[P], ...], list[P]]:
    """List the specs of the gradients of each chunk and of the ends."""
    layout, trained = model.layout, model.trained

    def specs_of(spreads: Sequence[Spread], mask: Mask) -> list[P]:
        return [spread.gradient for spread in chosen(spreads, mask)]

    return tuple(map(specs_of, layout.chunks, trained.chunks)), specs_of(layout.ends, trained.ends)


def manual(plan: Plan, specs: Tree) -> Tree:
    """Reduce specs to the axes that the kernel handles."""
    return jax.tree.map(lambda spec: kernel_spec(spec, plan.axes.manual), specs)


def make_rank(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    num_microbatches: int | None = None,
    counts: Mapping[str, Any] | None = None,
    made: Mapping[str, Leaves] | None = None,
) -> Rank:
    """Make the `Rank` from the rank's shards, within the shard_map.

    With ``num_microbatches`` the run does not use the schedule, and sequences are whole. With
    ``counts`` an earlier program has counted padding; ``made`` has the weights that it has made.
    """
    layout, rests = model.layout, (_squeeze(weights.chunks_rest), weights.ends_rest)
    chunks = tuple(map(defer_reduction, _squeeze(weights.chunks), layout.chunks))
    leaves, treedef = jax.tree.flatten(weights.ends)
    ends = jax.tree.unflatten(treedef, gather_ends(leaves, layout.ends, made or {}))
    local = Weights(chunks, defer_reduction(ends, layout.ends), *rests)

    # The batch, cut into units.
    slices = Slices() if num_microbatches else Slices(plan.schedule.num_slices)
    lengths = plan.lengths
    if slices.count > 1 and plan.engine == "programs" and not lengths:  # each slice has programs
        longest = max(x.shape[1] for x in jax.tree.leaves(batch.inputs) if x.ndim > 1)
        lengths = (longest * plan.axes.size(plan.axes.positions) // slices.count,) * slices.count
    if slices.count > 1 and lengths:
        slices = Slices(slices.count, lengths, lengths.index(max(lengths)))
    num_microbatches = num_microbatches or plan.schedule.num_microbatches

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])
        return x if slices.count == 1 else cut(x, slices.count, lengths)

    # From here on all values vary over the axes of rows, positions and stages, and `vary` marks
    # every new value. The gradient of a weight that did not vary would be summed over ranks in each
    # backward (the transpose of `vary` is a sum); and refs, carries and results of branches must
    # agree in their axes. If types are not tracked, `vary` does nothing.
    axes = plan.axes.varying
    local, batch = vary(local, axes), vary(batch.map_rows(split, lambda x: x), axes)
    store = ChunkWeights(list(map(jax.tree.leaves, local.chunks)), layout.chunks)
    rank = Rank(
        model,
        local,
        store,
        batch,
        plan.lint,
        axes,
        slices,
        BatchPart(plan.axes.rows, plan.axes.positions, slices.count),
    )
    if counts is not None:
        part = dataclasses.replace(rank.batch_part, **counts)
        return dataclasses.replace(rank, batch_part=part)
    units = num_microbatches * slices.count
    return rank.with_padding(units, units * plan.axes.num_parts)


def _squeeze(tree: Tree) -> Tree:
    """Drop the leading axis of length 1 that a sharded [S, ...] leaf has on its rank."""
    return jax.tree.map(lambda x: x[0], tree)


def _was_sent(program: Program, runs: jax.Array) -> jax.Array:
    """Return [T, slots, S, C] whether a channel's message comes from an entry that runs."""
    num_slots, num_ranks, num_channels = program.arrival.shape[1:]
    # For every entry of `arrival`: the rank that sent it, and whether it was sent one slot earlier.
    source = np.zeros((num_slots, num_ranks, num_channels), np.int32)
    late = np.zeros(source.shape, bool)
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            late[index, :, column] = program.delayed and channel.shift != 0
            for rank, destination in channel.edges:
                source[index, destination, column] = rank
    slots = np.arange(num_slots)[:, None, None]
    before = jnp.roll(runs.reshape(-1, num_ranks), 1, axis=0).reshape(runs.shape)
    return jnp.where(late, before[:, slots, source], runs[:, slots, source])
