"""The places and sums that the actions of a program need, made before its first tick."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import Leaves, Tree, at, blank, partition, real, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.jaxpr.scopes import HOST_POOLS
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.device import Pool
from pipeline.core.step.stores.host import HostPool
from pipeline.core.step.stores.store import Stores
from pipeline.core.step.stores.totals import Sums, Total, window_totals
from schedules.lowering.program import Program


@dataclass(frozen=True, eq=False)
class StepRequest:
    """Results wanted of a step, beside those that its program names.

    Attributes:
      training: whether anything goes back.
      take_loss: whether a forward's results are losses rather than outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      logprobs: whether a forward's results are the log-probabilities of targets.
      masked: whether everything is computed unconditionally: stashes and crossings then need a
        discard place, and gradients are formed by value.
    """

    training: bool
    take_loss: bool
    want_inputs: bool = False
    logprobs: bool = False
    masked: bool = False


@dataclass(frozen=True, eq=False)
class Places:
    """All that actions read, write and add to.

    Attributes:
      sums: what the step adds up and keeps.
      stores: values between actions.
      residuals: a stage's pullback taken apart, if forwards stash its residuals.
      halves: a stage's backward in two, if the program splits any.
    """

    sums: Sums
    stores: Stores
    residuals: Any = None
    halves: Any = None


def make_places(local: LocalModel, program: Program, step: StepRequest) -> Places:
    """All places of the actions of a program; one without backward is an inference.

    Args:
      local: the rank's part of the model.
      program: what runs.
      step: what is wanted of the step.
    """
    units, axes, values = program.schedule.num_units, local.axes, program.values
    windows = program.windows.gradients if program.windows else ()
    sums = make_sums(local, step, units, windows)
    residuals: Any = None
    if step.training and program.keep == "residuals":
        residuals = local.residuals()
    messages = Pool(local.wire, values["operand"].device + 1, axes, "messages")
    device = {"operand": messages, "gradient": messages}
    # All actions of a masked step read, whatever is there, and one more place is theirs to write.
    places = values["stash"].device + step.masked
    stashed = residuals.stashed if residuals and places else []
    device["stash"] = Pool(stashed, places, axes, "stashes", cleared=step.masked)
    halves: Any = None
    if any(op.kind in "IW" for slot in program.slots for op in slot.ops):
        halves = local.split_backward(residuals, in_place=not step.masked)
    places = values["crossing"].device + step.masked
    crossing = halves.crossing if halves and places else []
    device["crossing"] = Pool(crossing, places, axes, "crossings", cleared=step.masked)
    outputs = [] if step.take_loss else _output_types(local, logprobs=step.logprobs)
    sums = dataclasses.replace(sums, results=Pool(outputs, units, axes, "kept"))
    # Without residuals a stash in host memory holds the stage's input, as it is in a message.
    stash = local.wire if residuals is None else residuals.stashed
    types = {"stash": stash, "crossing": halves.crossing if halves else []}
    host = {
        kind: HostPool(of, values[kind].host, values[kind].device, axes, HOST_POOLS[n])
        for n, (kind, of) in enumerate(types.items())
        if values[kind].host
    }
    return Places(sums, Stores(device, host), residuals, halves)


def make_sums(
    local: LocalModel,
    step: StepRequest,
    num_microbatches: int,
    windows: Sequence[int] = (),
) -> Sums:
    """Make the sums of a step, and the places of its inputs' gradients.

    Args:
      local: the rank's part of the model.
      step: what is wanted of the step.
      num_microbatches: M; with slices the number of units.
      windows: [V] the window of each chunk's gradients, if there are any.
    """
    axes, model = local.axes, local.model
    types = dict(local.rank.facts.stage_sums)
    if step.take_loss:
        scalar = jnp.zeros(())
        types |= {"loss": [scalar], "weight": [scalar], "metrics": local.metrics[0]}
    scalars = {name: Total(list(map(zeros, of)), axes) for name, of in types.items()}
    added = Total([jnp.zeros((), real())] if local.rank.facts.adds else [], axes)

    def summed(weights: Leaves, mask: Mask) -> Leaves:
        return as_summed(chosen(weights, mask), model.grad_dtype) if step.training else []

    trained, of_chunks = model.trained, added.refs if local.adds else []
    like = [summed(*of) for of in zip(local.rank.chunks.whole, trained.chunks, strict=True)]
    chunk_grads: list[Any]
    if windows and step.training:
        spreads = [chosen(*of) for of in zip(model.layout.chunks, trained.chunks, strict=True)]
        chunk_grads = window_totals(like, axes, spreads, windows, of_chunks)
    else:
        chunk_grads = [Total(own, axes, of_chunks) for own in like]
    of_ends = added.refs if local.rank.facts.adding_ends else []
    ends_grads = Total(summed(local.ends_weights, trained.ends), axes, of_ends)
    floats, _ = partition(at(local.batch.inputs, 0))
    kept = Pool(floats if step.want_inputs else [], num_microbatches, axes, "kept")
    return Sums(local.keep, scalars, added, chunk_grads, ends_grads, kept)


def _output_types(local: LocalModel, *, logprobs: bool) -> Tree:
    if logprobs:
        targets = at(local.batch.targets, 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), targets)
    given = local.rank, local.ends_weights, blank(local.output, local.axes), 0
    # Their shapes are seen by `pipeline.lint.outputs`.
    return jax.eval_shape(lambda: finish(*given, take_loss=False).value)
