"""The storage and the sums for the actions of a program, made before its first tick."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import Leaves, Tree, at, blank, partition, real, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.jaxpr.scopes import HOST_POOLS
from pipeline.core.model.overlay import View, overlay_trees
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.stores.device import Pool
from pipeline.core.step.stores.host import HostPool
from pipeline.core.step.stores.store import Stores
from pipeline.core.step.stores.totals import StepSums, Total
from pipeline.core.step.stores.windows import chunk_totals
from schedules.lowering.program import Program
from schedules.lowering.windows import Windows


def make_places(
    step: OpenedStep, program: Program
) -> tuple[StepSums, Stores, list[dict[str, Any]]]:
    """Make the storage for the actions of a program.

    Returns:
      The sums; the stores, with places that fit the values of any kind of stages; and for each kind
      the arguments of `Actions` that are its part of both.
    """
    # A program with windows sums a chunk's gradients in a window; without windows they stay whole
    # for the step.
    kinds, axes, values = step.kinds, step.rank.axes, program.values
    sums = make_sums(step, program.windows)
    # A trace of a stage shows the types of its residuals and crossing values, which places need.
    # Splitting a backward needs a trace, so it is done only for a program with I and W.
    keeps = step.request.training and program.keep == "residuals"
    splits = any(op.kind in "IW" for slot in program.slots for op in slot.ops)
    residuals = [kind.residuals() if keeps else None for kind in kinds]
    pairs = list(zip(kinds, residuals, strict=True))
    halves = [kind.split_backward(of) if splits else None for kind, of in pairs]
    # The values of all kinds share places. Without residuals, a stash in host memory holds the
    # stage's input, in the form of a message.
    wire, x_views = kinds[0].wire, [kind.x_view for kind in kinds]
    stash, stash_views = overlay_trees([of.stashed if of else [] for of in residuals])
    crossing, crossing_views = overlay_trees([of.crossing if of else [] for of in halves])
    types = {"stash": stash if keeps else wire, "crossing": crossing}
    views = {
        "operand": x_views,
        "gradient": [kind.y_view for kind in kinds],
        "stash": stash_views if keeps else x_views,
        "crossing": crossing_views,
    }
    # Messages of both directions share one pool (`ValueKind.pool`). The additional place is the
    # discard place: a rank stores received messages that it does not need there, without a branch.
    messages = Pool(wire, values["operand"].device + 1, axes, "messages")
    device = {"operand": messages, "gradient": messages}
    for value, of, name in ("stash", stash, "stashes"), ("crossing", crossing, "crossings"):
        places = values[value].device
        device[value] = Pool(of if places else [], places, axes, name, cleared=False)
    host = {
        value: HostPool(of, values[value].host, values[value].device, axes, HOST_POOLS[n])
        for n, (value, of) in enumerate(types.items())
        if values[value].host
    }
    stores = Stores(device, host)
    parts = [
        {
            "sums": sums_of_kind(sums, kind),
            "stores": stores.viewed({name: of[n] for name, of in views.items()}),
            "residuals": residuals[n],
            "halves": halves[n],
        }
        for n, kind in enumerate(kinds)
    ]
    return sums, stores, parts


def make_sums(step: OpenedStep, windows: Windows | None = None) -> StepSums:
    """Make the sums of a step, and the storage of its inputs' gradients and of its outputs.

    ``windows`` are the program's windows of weights and gradients, if it has any.
    """
    rank, request, units = step.rank, step.request, step.plan.schedule.num_units
    axes, model = rank.axes, rank.model
    types = dict(rank.facts.stage_sums)
    if request.take_loss:
        scalar = jnp.zeros(())
        types |= {"loss": [scalar], "weight": [scalar], "metrics": step.metrics[0]}
    scalars = {name: Total(list(map(zeros, of)), axes) for name, of in types.items()}
    added = Total([jnp.zeros((), real())] if rank.facts.adds else [], axes)

    def summed(weights: Leaves, mask: Mask) -> Leaves:
        return as_summed(chosen(weights, mask), model.grad_dtype) if request.training else []

    # Only the types of whole weights are used; nothing is gathered here.
    trained, whole = model.trained, rank.chunks.whole
    like = jax.eval_shape(lambda: [summed(whole(v), of) for v, of in enumerate(trained.chunks)])
    spreads = [chosen(*of) for of in zip(model.layout.chunks, trained.chunks, strict=True)]
    chunk_grads = chunk_totals(like, axes, windows if request.training else None, spreads)
    # A pullback returns the sum of added losses after the gradients of weights, so the ref of this
    # sum is the last target.
    ends_grads = Total(summed(rank.ends, trained.ends), axes)
    ends_grads = ends_grads.viewed(View(), added.refs if rank.facts.adding_ends else [])
    floats, _ = partition(at(rank.batch.inputs, 0))
    # Outputs have a place for each microbatch, since all of them leave the step.
    outputs = [] if request.take_loss else _output_types(step)
    kept = {"pads": bool(rank.slices.lengths)}
    input_grads = Pool(floats if request.want_inputs else [], units, axes, "kept", **kept)
    results = Pool(outputs, units, axes, "kept", **kept)
    return StepSums(scalars, added, chunk_grads, ends_grads, input_grads, results)


def sums_of_kind(sums: StepSums, kind: StageKind) -> StepSums:
    """Select the sums of one kind of stages from the sums of chunks, which cover all kinds."""
    rank, totals = kind.rank, list(sums.chunk_grads)
    added, params = sums.added.refs if kind.adds else [], kind.position.views.params
    for chunk in {rank.model.stages[k].chunk for k in kind.stages}:
        view = View()
        # Refs exist for leaves that any stage of the chunk trains. A kind whose leaves fill all
        # refs adds to the refs directly; other kinds need a map from leaves to refs.
        cells = np.flatnonzero(rank.model.trained.chunks[chunk]).tolist()
        number = {cell: n for n, cell in enumerate(cells)}
        spots = chosen(params.places(rank.chunks.shards[chunk]), kind.need.weights)
        if [(spot.cell, spot.part) for spot in spots] != [(cell, None) for cell in cells]:
            of = tuple(dataclasses.replace(spot, cell=number[spot.cell]) for spot in spots)
            view = View(None, of)
        totals[chunk] = totals[chunk].viewed(view, added)
    return dataclasses.replace(sums, chunk_grads=totals)


def _output_types(step: OpenedStep) -> Tree:
    if step.request.logprobs:
        targets = at(step.rank.batch.targets, 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), targets)
    y = blank(step.activations.types[-1], step.rank.axes)
    # `pipeline.lint.outputs` checks their shapes.
    return jax.eval_shape(lambda: finish(step.rank, step.rank.ends, y, 0, take_loss=False).value)
