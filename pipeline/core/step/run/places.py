"""The places and sums that the actions of a program need, made before its first tick."""

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


@dataclass(frozen=True, eq=False)
class StepRequest:
    """The results that a step returns, which its program does not determine.

    Attributes:
      training: whether backwards run.
      take_loss: whether a forward's results are losses rather than outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      logprobs: whether a forward's results are the log-probabilities of targets.
    """

    training: bool
    take_loss: bool
    want_inputs: bool = False
    logprobs: bool = False


@dataclass(frozen=True, eq=False)
class StepPlaces:
    """All that actions read, write and add to.

    Attributes:
      sums: what the step adds up and keeps.
      stores: values between actions.
      residuals: a stage's pullback taken apart, if forwards stash its residuals.
      halves: a stage's backward in two, if the program splits any.
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
    """All places of the actions of a program; one without backward is an inference.

    Args:
      plan: the options of the pipeline.
      local: the rank's part of the model.
      program: what runs.
      step: what is wanted of the step.
    """
    # A chunk's gradients are summed in a window where the program has windows, else whole for the
    # step.
    units, axes, values = program.schedule.num_units, local.axes, program.values
    sums = make_sums(local, step, units, program.windows)
    # Tracing a stage shows its residuals, and so the types of the places that keep them.
    residuals: Any = None
    if step.training and program.keep == "residuals":
        residuals = local.residuals()
    # Messages of both directions share one pool (`ValueKind.pool`). The place that is added is the
    # discard place: a rank stores there what it receives and does not need, without a condition.
    messages = Pool(local.wire, values["operand"].device + 1, axes, "messages")
    device = {"operand": messages, "gradient": messages}
    places = values["stash"].device
    stashed = residuals.stashed if residuals and places else []
    device["stash"] = Pool(stashed, places, axes, "stashes", cleared=False)
    halves: Any = None
    # To split a backward is to trace it, so that is done only for a program with I and W.
    if any(op.kind in "IW" for slot in program.slots for op in slot.ops):
        halves = local.split_backward(residuals)
    places = values["crossing"].device
    crossing = halves.crossing if halves and places else []
    device["crossing"] = Pool(crossing, places, axes, "crossings", cleared=False)
    # Without residuals a stash in host memory holds the stage's input, as it is in a message.
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
    """Make the sums of a step, and the places of its inputs' gradients.

    Args:
      local: the rank's part of the model.
      step: what is wanted of the step.
      num_microbatches: M; with slices the number of units.
      windows: those of weights and gradients, if the program has any.
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
    # Whole weights are looked at for their types alone; nothing is gathered here.
    chunks = local.rank.chunks.whole
    like = jax.eval_shape(lambda: list(map(summed, chunks, trained.chunks)))
    spreads = [chosen(*of) for of in zip(model.layout.chunks, trained.chunks, strict=True)]
    windows = windows if step.training else None
    chunk_grads = chunk_totals(like, axes, of_chunks, windows, spreads)
    # A pullback returns the sum of added losses after the gradients of weights: its ref is the last
    # of the targets.
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
    # Their shapes are seen by `pipeline.lint.outputs`.
    return jax.eval_shape(lambda: finish(*arguments, take_loss=False).value)
