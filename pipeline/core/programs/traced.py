"""A pipeline's model, traced once on one rank, for all programs of its ranks.

Letters: K stages, V chunks. A program is traced by itself, so that no arrays of a trace are of use
in another. What they share is what the trace has shown: facts, and the types of the values that
pass between programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.base.masks import Needs
from pipeline.base.tree import Leaves, Tree, signature
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.groups import StageGroup
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.rank import LossScale
from pipeline.core.step.inspect import Inspected, inspect
from pipeline.core.step.ranks import make_rank
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.run.grouped import own_totals
from pipeline.core.step.run.places import StepPlaces, StepRequest, make_sums
from pipeline.core.step.runtime import loss_scale
from pipeline.core.step.share import find_share
from pipeline.core.step.stores.slices import WholeSequences
from pipeline.core.step.stores.store import Row, Stores
from pipeline.core.step.stores.totals import StepSums
from schedules.lowering.program import Op
from schedules.orders.schedule import Schedule


@dataclass(frozen=True, eq=False)
class StepKind:
    """What a step returns, static.

    Attributes:
      plan, model: the pipeline's.
      request: the results that actions keep.
      counts: whether the step counts as one that trains, and `normalise`: as of
        `pipeline.core.step.runtime.train`.
    """

    plan: Plan
    model: Model
    request: StepRequest
    counts: bool = False
    normalise: bool = True

    @property
    def schedule(self) -> Schedule:
        """The orders of the ranks."""
        whole = self.plan.schedule
        return whole if self.request.training else whole.forward()

    @property
    def needs(self) -> Needs:
        """[K] how far each stage's backward goes."""
        training, want_inputs = self.request.training, self.request.want_inputs
        return self.model.trained.needs_gradients(want_inputs=want_inputs, backward=training)

    def op(self, kind: Any, stage: int) -> Op:
        """An action of a stage."""
        last = self.plan.schedule.num_stages - 1
        return Op(kind, self.plan.schedule.chunk_of[stage], stage == 0, stage == last)


@dataclass(frozen=True, eq=False)
class StageTypes:
    """The types of values of a stage, as programs have them inside.

    Attributes:
      operand, gradient: its input, and its output or the gradient for that.
      stash: what F keeps for its backward beside the input.
      crossing: what I leaves for W.
      code: equal for stages whose programs are the same.
      work: kinds of actions that compute anything.
      sends: whether a backward has a gradient for the stage before.
    """

    operand: Tree
    gradient: Tree
    stash: Leaves
    crossing: Leaves
    code: Any
    work: frozenset[str]
    sends: bool


@dataclass(frozen=True, eq=False)
class Traced:
    """What a trace of the whole model has shown.

    Attributes:
      kind: the step.
      inspected: the facts; its arrays are those of a trace that is over.
      loss: the factors of losses that are known, None for those that are arrays.
      factors: the types of those.
      sums: the types of all sums of a rank, by name.
      stages: [K] types.
      unsplit: parts of backwards that could not be split.
    """

    kind: StepKind
    inspected: Inspected
    loss: LossScale
    factors: dict[str, Any]
    sums: dict[str, Leaves]
    stages: list[StageTypes]
    unsplit: tuple[str, ...] = ()

    def on_rank(self, weights: Weights, batch: Batch, factors: Mapping[str, Any]) -> Inspected:
        """The model on a rank's arrays, in another trace."""
        rank = make_rank(self.kind.plan, self.kind.model, weights, batch)
        rank = dataclasses.replace(rank, loss=dataclasses.replace(self.loss, **factors))
        return self.inspected.on(rank)


def trace(kind: StepKind, weights: Weights, batch: Batch, scale: Any) -> Traced:
    """Trace a model within a rank's shard_map."""
    plan, request = kind.plan, kind.request
    rank = make_rank(plan, kind.model, weights, batch)
    rank = dataclasses.replace(rank, loss=first_loss(kind, scale))
    reaches = request.want_inputs or kind.model.trained.embed or not request.training
    taking = {"take_loss": request.take_loss, "reaches": reaches}
    inspected = inspect(plan, rank, kind.needs, **taking)
    if not (request.take_loss or request.logprobs):
        plan.lint.outputs(inspected.local())
    plan.lint.whole(plan, inspected, training=kind.counts, unread=kind.normalise)
    loss = whole_loss(kind, inspected)
    local = inspected.local(loss=loss)
    plan.lint.effects(plan, local, again=request.training and plan.keep == "input")
    # Factors of losses that are numbers are part of a program; others are arguments of it.
    fields = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}
    factors = {name: jax.typeof(x) for name, x in fields.items() if isinstance(x, jax.core.Tracer)}
    known = dataclasses.replace(loss, **dict.fromkeys(factors))
    sums = make_sums(local, request, plan.schedule.num_units)
    types = {name: [jax.typeof(ref[...]) for ref in refs] for name, refs in sums.refs.items()}
    inspected = dataclasses.replace(inspected, rank=local.rank)
    stages, unsplit = _stages(kind, inspected, sums)
    return Traced(kind, inspected, known, factors, types, stages, unsplit)


def first_loss(kind: StepKind, scale: Any) -> LossScale:
    """The factors of losses that are known before any weight is."""
    if kind.request.training:
        return loss_scale(kind.plan, scale)
    return LossScale(counts=kind.request.take_loss)


def whole_loss(kind: StepKind, inspected: Inspected) -> LossScale:
    """All factors of losses."""
    if not kind.request.training:
        return inspected.rank.loss
    options: Any = {"normalise": kind.normalise, "run_forwards": _refuse_outputs}
    return find_share(kind.plan, inspected, **options)


def _refuse_outputs(*_: Any) -> Any:
    raise ValueError(
        "engine='programs': loss_fn returns (sum, weight), and the weight follows from the outputs "
        "of the model where it has a gradient or stages call add_loss, so that a step would need "
        "its loss before it runs; let the weight follow from targets, or use engine='scan'"
    )


def _stages(
    kind: StepKind, inspected: Inspected, sums: StepSums
) -> tuple[list[StageTypes], tuple[str, ...]]:
    """[K] the types of stages, one trace for those that are alike; what could not be split."""
    found: dict[Any, StageTypes] = {}
    stages, unsplit = [], list[str]()
    kinds = {a.kind for order in kind.schedule.orders for a in order}
    for k in range(len(kind.model.stages)):
        actions = make_actions(kind, inspected, sums, k, Arguments({}), kinds)
        local, halves = actions.local, actions.halves
        position = kind.model.stages[k]
        ops = {name: kind.op(name, k) for name in kinds}
        ends = ops["F"].first, ops["F"].last
        code = (local.rank.code(position), position.chunk, ends, local.need, local.adds)
        code = code, signature((local.activation, local.output))
        if code not in found:
            work = {n for n, op in ops.items() if actions.does_anything(op)}
            if actions.leaves_nothing(ops["F"]):
                work.discard("F")
            found[code] = StageTypes(
                local.activation,
                local.output,
                actions.saved.residuals.stashed if actions.saved.residuals else [],
                halves.crossing if halves else [],
                code,
                frozenset(work),
                local.need.x and k > 0,
            )
            unsplit += halves.whole if halves else []
        stages.append(found[code])
    return stages, tuple(dict.fromkeys(unsplit))


class Arguments(Stores):
    """The values of one action: those that it reads are arguments of its program, and it returns
    those that it writes.

    Args:
      values: by kind.
    """

    def __init__(self, values: Mapping[str, Tree]) -> None:
        # The output of the last stage is where other stages have a gradient.
        super().__init__({kind: [value] for kind, value in values.items()}, {})
        self.written: dict[str, Tree] = {}

    def write(self, kind: str, op: Op, row: Row, value: Tree) -> None:  # noqa: ARG002
        """Return a value of a kind."""
        self.written[kind] = value


def make_actions(
    kind: StepKind,
    inspected: Inspected,
    sums: StepSums,
    stage: int,
    stores: Arguments,
    kinds: Any,
) -> Actions:
    """The actions of one stage.

    Args:
      kind: the step.
      inspected: the model on a rank.
      sums: of the rank, over all stages.
      stage: which.
      stores: the values that an action reads.
      kinds: of the actions that are to run.
    """
    rank, types = inspected.rank, inspected.activations.types
    position, need = rank.model.stages[stage], inspected.needs[stage]
    x, y = types[stage], types[stage + 1]
    local = LocalModel(rank, position, x, y, need, x, adds=rank.facts.adding_stages[stage])
    sums = dataclasses.replace(sums, keep=local.keep)
    residuals = halves = None
    if kind.request.training:
        totals = own_totals(sums, StageGroup((stage,), position, local, None, None))
        sums = dataclasses.replace(sums, chunk_grads=totals)
        residuals = local.residuals() if kind.plan.keep == "residuals" else None
        if kinds & {"I", "W"}:
            halves = local.split_backward(residuals, in_place=True)
    places = StepPlaces(sums, stores, residuals, halves)
    return Actions(local, kind.request, places, WholeSequences())
