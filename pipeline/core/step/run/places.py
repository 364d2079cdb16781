"""The storage and the sums for the actions of a program, made before its first tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.masks import Mask, chosen
from pipeline.base.tree import Leaves, Tree, at, blank, partition, real, zeros
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.jaxpr.scopes import HOST_POOLS
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.ends import finish
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.device import Pool
from pipeline.core.step.stores.host import HostPool
from pipeline.core.step.stores.store import Stores
from pipeline.core.step.stores.totals import StepSums, Total
from pipeline.core.step.stores.windows import chunk_totals
from schedules.lowering.program import Program
from schedules.lowering.windows import Windows


@dataclass(frozen=True)
class StepRequest:
    """The results that a step must return; the program does not determine them.

    Attributes:
      training: whether backwards run.
      take_loss: whether the step computes losses; else outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      logprobs: whether a forward's results are the log-probabilities of targets.
      counts: whether the step counts as a training step.
      normalise: whether gradients are those of the step's loss; else those of the sum of losses.
    """

    training: bool
    take_loss: bool
    want_inputs: bool = False
    logprobs: bool = False
    counts: bool = False
    normalise: bool = False


def training_request(*, want_inputs: bool = False, normalise: bool = True) -> StepRequest:
    wanted = {"want_inputs": want_inputs, "normalise": normalise}
    return StepRequest(training=True, take_loss=True, counts=True, **wanted)


@dataclass(frozen=True, eq=False)
class StepPlaces:
    """The storage that actions read, write and add to.

    Attributes:
      sums: the sums of the step, and values kept for its results.
      stores: the values between actions.
      residuals: a stage's pullback, split into forward and backward, if forwards stash residuals.
      halves: a stage's backward in two halves, if the program has I and W.
    """

    sums: StepSums
    stores: Stores
    residuals: Any = None
    halves: Any = None


def make_places(
    plan: Plan,  # noqa: ARG001  a store whose option is read here: CONTRIBUTING.md
    local: LocalModel,
    program: Program,
    step: StepRequest,
) -> StepPlaces:
    """Make the storage for the actions of a program.

    Args:
      plan: the options of the pipeline.
      local: the rank's part of the model.
      program: the program that runs.
      step: the wanted results.
    """
    # A program with windows sums a chunk's gradients in a window; without windows they stay whole
    # for the step.
    units, axes, values = program.schedule.num_units, local.axes, program.values
    sums = make_sums(local, step, units, program.windows)
    # A trace of a stage shows the types of its residuals, which the stash places need.
    residuals: Any = None
    if step.training and program.keep == "residuals":
        residuals = local.residuals()
    # Messages of both directions share one pool (`ValueKind.pool`). The additional place is the
    # discard place: a rank stores received messages that it does not need there, without a branch.
    messages = Pool(local.wire, values["operand"].device + 1, axes, "messages")
    device = {"operand": messages, "gradient": messages}
    places = values["stash"].device
    stashed = residuals.stashed if residuals and places else []
    device["stash"] = Pool(stashed, places, axes, "stashes", cleared=False)
    halves: Any = None
    # Splitting a backward needs a trace, so it is done only for a program with I and W.
    if any(op.kind in "IW" for slot in program.slots for op in slot.ops):
        halves = local.split_backward(residuals)
    places = values["crossing"].device
    crossing = halves.crossing if halves and places else []
    device["crossing"] = Pool(crossing, places, axes, "crossings", cleared=False)
    # Without residuals, a stash in host memory holds the stage's input, in the form of a message.
    stash = local.wire if residuals is None else residuals.stashed
    types = {"stash": stash, "crossing": halves.crossing if halves else []}
    host = {
        kind: HostPool(of, values[kind].host, values[kind].device, axes, HOST_POOLS[n])
        for n, (kind, of) in enumerate(types.items())
        if values[kind].host
    }
    return StepPlaces(sums, Stores(device, host), residuals, halves)


def make_sums(
    local: LocalModel,
    step: StepRequest,
    num_microbatches: int,
    windows: Windows | None = None,
) -> StepSums:
    """Make the sums of a step, and the storage of its inputs' gradients.

    Args:
      local: the rank's part of the model.
      step: the wanted results.
      num_microbatches: M; with slices the number of units.
      windows: the program's windows of weights and gradients, if it has any.
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
    # Only the types of whole weights are used; nothing is gathered here.
    chunks = local.rank.chunks.whole
    like = jax.eval_shape(lambda: list(map(summed, chunks, trained.chunks)))
    spreads = [chosen(*of) for of in zip(model.layout.chunks, trained.chunks, strict=True)]
    windows = windows if step.training else None
    chunk_grads = chunk_totals(like, axes, of_chunks, windows, spreads)
    # A pullback returns the sum of added losses after the gradients of weights, so the ref of this
    # sum is the last target.
    of_ends = added.refs if local.rank.facts.adding_ends else []
    ends_grads = Total(summed(local.ends_weights, trained.ends), axes, of_ends)
    floats, _ = partition(at(local.batch.inputs, 0))
    input_grads = Pool(floats if step.want_inputs else [], num_microbatches, axes, "kept")
    # Outputs have a place for each microbatch, since all of them leave the step.
    outputs = [] if step.take_loss else _output_types(local, logprobs=step.logprobs)
    results = Pool(outputs, num_microbatches, axes, "kept")
    return StepSums(local.keep, scalars, added, chunk_grads, ends_grads, input_grads, results)


def _output_types(local: LocalModel, *, logprobs: bool) -> Tree:
    if logprobs:
        targets = at(local.batch.targets, 0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), targets)
    arguments = local.rank, local.ends_weights, blank(local.output, local.axes), 0
    # `pipeline.lint.outputs` checks their shapes.
    return jax.eval_shape(lambda: finish(*arguments, take_loss=False).value)
