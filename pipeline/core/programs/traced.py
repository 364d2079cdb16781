"""A pipeline's model, traced once on one rank, for all programs of its ranks.

Letters: K stages, V chunks. Each program has its own trace, and arrays of one trace cannot be used
in another. All programs share the facts of the first trace, and the types of the values that pass
between programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.base.masks import chosen
from pipeline.base.tree import Leaves, Tree
from pipeline.base.warn import warn_once
from pipeline.core.autodiff.jaxpr.evaluate import narrows
from pipeline.core.model.ends import stages_of_ends
from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.operands import Operands, StepOptions, find_operands
from pipeline.core.step.calls.kind import StageKind, key_of_kind
from pipeline.core.step.calls.opened import Once, OpenedStep, StepInputs
from pipeline.core.step.open import open_step
from pipeline.core.step.run.actions import Actions, sums_of_action
from pipeline.core.step.run.carries import sums_of_carry
from pipeline.core.step.run.places import make_sums, sums_of_kind
from pipeline.core.step.runtime import NOTHING_TO_GATHER
from pipeline.core.step.stores.device import check_no_host
from pipeline.core.step.stores.slices import Carries
from pipeline.core.step.stores.store import ActionValues
from pipeline.core.step.stores.totals import StepSums
from schedules.lowering.dispatch import Work
from schedules.lowering.program import Op
from schedules.lowering.windows import windows


@dataclass(frozen=True, eq=False)
class StageTypes:
    """The types of a stage's values within a program.

    Attributes:
      operand: the stage's input, and the gradient for the input.
      gradient: the stage's output, and the gradient for the output.
      stash: the values that F keeps for the stage's backward, without the input.
      crossing: the values from I to W.
      carry: the values that a slice leaves for later slices of its sequence.
      carry_gradient: the sums of gradients for them.
      actions: the kinds of the stage's actions that compute anything.
      sends: whether the stage's backward sends a gradient to the previous stage, or to the
        embedding that all ranks share.
      representative: the first stage whose programs equal this stage's programs.
    """

    operand: Tree
    gradient: Tree
    stash: Leaves
    crossing: Leaves
    carry: Tree
    carry_gradient: Leaves
    actions: frozenset[str]
    sends: bool
    representative: int

    def types_of(self, name: str) -> Tree:
        """Return the types of a value by its name (`ValueKind.name_of`)."""
        types: Tree = getattr(self, name.rstrip("0123456789"))
        return types


@dataclass(frozen=True, eq=False)
class Traced:
    """The facts and types that a trace of the whole model has shown.

    Attributes:
      known: the facts, without arrays. Its rank has those factors of losses that are Python
        numbers.
      once: the types of the arrays that the step computes once.
      sums: the types of all sums of a rank, and of declared state, by name.
      stages_of_sums: with ``stage_meshes`` `ProgramStep.stages_of_sums`; else empty.
      is_narrow: whether the model computes in floats in which gradients may vanish or overflow.
      needs_ratio: whether the step needs `StepInputs.ratio` and got none.
      stages: [K][N] the types of each stage's values, for each slice.
      unsplit: parts of backwards that could not be split.
    """

    operands: Operands
    known: OpenedStep
    once: Once
    sums: dict[str, Leaves]
    stages_of_sums: dict[str, int]
    is_narrow: bool
    needs_ratio: bool
    stages: list[list[StageTypes]]
    unsplit: tuple[str, ...]

    @property
    def options(self) -> StepOptions:
        return self.operands.options

    @property
    def shared(self) -> Once:
        """The types of `once` that every later program takes: all but weights."""
        return dataclasses.replace(self.once, weights=None)

    @property
    def made(self) -> dict[str, Leaves]:
        """The types of the weights that the step, or a gather of their chunk, makes, by name."""
        return self.once.weights or {}

    @functools.cached_property
    def windows(self) -> list[int | None]:
        """[K] the window of each stage's gathered weights (`Work.windows`)."""
        if not self.options.plan.gathers_by_program:
            return []
        schedule, stages = self.options.schedule, self.options.model.stages
        places = windows(schedule).weights
        pairs = zip(schedule.chunk_of, stages, strict=True)
        return [places[v] if self.made_of(stage.chunk) else None for v, stage in pairs]

    def made_of(self, chunk: int | str) -> dict[str, Leaves]:
        """Return the part of `made` of a chunk, or of "ends"."""
        return {name: of for name, of in self.made.items() if name.startswith(f"ready{chunk}.")}

    def made_for(self, op: Op) -> dict[str, Leaves]:
        """Return the part of `made` that an action reads."""
        of_ends = self.made_of("ends") if op.first or op.last else {}
        return self.made_of(op.chunk) | of_ends

    def reads_ends(self, rank: int) -> bool:
        """Tell whether a rank runs embed or head."""
        placement = self.options.schedule.placement
        return bool(self.options.plan.shared) or rank in (placement[0], placement[-1])

    def sums_on(self, rank: int) -> dict[str, Leaves]:
        """Return the types of the sums that a rank has, by name."""
        placement, stages = self.options.schedule.placement, self.stages_of_sums
        return {
            name: types
            for name, types in self.sums.items()
            if name not in stages or placement[stages[name]] == rank
        }

    def sums_of(self, op: Op, rank: int) -> tuple[str, ...]:
        """List the names of sums and of state that a rank's action may change."""
        names = [name for name, types in self.sums_on(rank).items() if types]
        training = self.options.request.training
        return sums_of_action(op, names, self.known.rank.facts, training=training)

    @property
    def wire(self) -> Tree:
        """The type of all activations, if ranks share embed or head."""
        return self.stages[0][0].operand

    def sums_of_joint(self, part: str) -> tuple[str, ...]:
        """List the names of the sums that work of all ranks may change (`Joint`)."""
        model, ends = self.options.model, [name for name in self.sums if name.startswith("ends")]
        table = f"ends{sum(model.trained.ends[: model.tables.embed])}"
        head = [*ends, "loss", "weight", "results"]
        names = {"lookup": [], "scatter": [table], "head": head}[part]
        return tuple(name for name in names if self.sums.get(name))

    def open(
        self, weights: Weights, batch: Batch, inputs: StepInputs, once: Once | None = None
    ) -> ProgramStep:
        """Open the step on a rank's arrays in another trace.

        Args:
          once: the arrays that an earlier program has computed; None to compute them.
        """
        options, of_outputs = self.options, lambda _: inputs.ratio
        arguments = options.plan, options.model, options.request, weights, batch, inputs
        step = open_step(*arguments, known=self.known, once=once, run_forwards=of_outputs)
        return ProgramStep(options, step)


class ProgramStep:
    """A rank's opened step while one program is traced, with a ref for each sum.

    Attributes:
      sums: the sums to which actions add, such as gradients and losses.
      refs: by name, the refs of these sums and of declared state.
    """

    def __init__(self, options: StepOptions, step: OpenedStep) -> None:
        self.options, self.step = options, step
        self.sums: StepSums = make_sums(step)
        declared = step.rank.declared
        self.refs = dict(self.sums.refs)
        for n, (_, ref) in enumerate(declared.refs if declared else ()):
            self.refs[f"state{n}"] = [ref]

    def stages_of_sums(self) -> dict[str, int]:
        """Map each sum that only one rank computes to a stage on that rank.

        Each chunk is one stage here. Every rank contributes to the sums that are not listed.
        """
        model, rank = self.options.model, self.step.rank
        last = len(model.stages) - 1
        stages = {"inputs": 0} | dict.fromkeys(("results", "metrics", "loss", "weight"), last)
        stages |= {f"chunk{v}": v for v in range(last + 1)}
        trained = chosen(stages_of_ends(rank.weights.ends, last), model.trained.ends)
        stages |= {f"ends{n}": stage for n, stage in enumerate(trained)}
        of_state = stages_of_ends(rank.weights.ends_rest, last)
        for n, ((chunk, cell), _) in enumerate(rank.declared.refs if rank.declared else ()):
            stages[f"state{n}"] = of_state[cell] if chunk is None else chunk
        return stages

    def put(self, values: Mapping[str, Leaves]) -> None:
        """Set the sums to values that earlier programs returned."""
        for name, arrays in values.items():
            for ref, array in zip(self.refs[name], arrays, strict=True):
                ref[...] = array

    def get(self, names: Collection[str]) -> dict[str, Leaves]:
        return {name: [ref[...] for ref in self.refs[name]] for name in names}

    def actions(
        self, stage: int, part: int, stores: ActionValues, kinds: Collection[str]
    ) -> Actions:
        """Make a stage's actions of these kinds on a slice; ``stores`` has what they read."""
        options, step = self.options, self.step
        rank, of = step.by_slice[part]
        x, y = of.types[stage : stage + 2]
        need, adds = step.needs[stage], rank.facts.adding_stages[stage]
        carries = {"carry": of.carries[stage], "earlier": step.activations.carries[stage]}
        kind = StageKind(rank, (stage,), x, y, need, wire=x, adds=adds, **carries)
        slices = Carries()
        if (N := rank.slices.count) > 1:
            places = stores.of_slices["carry"], stores.of_slices["carry_gradient"]
            slices = Carries(kind.earlier, kind.carry, part, rank.axes, N, *places)
        residuals = kind.residuals() if options.keeps_residuals else None
        splits = options.request.training and bool({"I", "W"} & set(kinds))
        halves = kind.split_backward(residuals) if splits else None
        parts: Any = {"residuals": residuals, "halves": halves}
        sums = sums_of_kind(self.sums, kind)
        return Actions(kind, options.request, sums=sums, stores=stores, slices=slices, **parts)


def trace_ranks(
    options: StepOptions, weights: Weights, batch: Batch, given: StepInputs
) -> list[Traced]:
    """Trace the [S] models of ranks; ranks with equal abstract meshes share one trace."""
    known: dict[Any, Traced] = {}
    plans = options.plan.of_ranks
    for plan in plans:
        if plan.mesh.abstract_mesh not in known:
            of_rank = dataclasses.replace(options, plan=plan)
            operands = find_operands(of_rank, weights, batch, given)
            known[plan.mesh.abstract_mesh] = _trace(operands)
    return [known[plan.mesh.abstract_mesh] for plan in plans]


def _trace(operands: Operands) -> Traced:
    results = []

    def body(leaves: list[Any]) -> None:
        results.append(_trace_on_device(operands, *operands.of(leaves)))

    jax.eval_shape(operands.sharded(body, (operands.manual,), None), operands.types)
    return results[0]


def _trace_on_device(
    operands: Operands, weights: Weights, batch: Batch, given: StepInputs
) -> Traced:
    """Trace the model within a rank's shard_map."""
    options = operands.options
    plan, request = options.plan, options.request
    missing = []

    def of_outputs(_: OpenedStep) -> Any:
        missing.append(given.ratio is None)
        return given.ratio or (1.0, 1.0)

    of_step = plan, options.model, request, weights, batch, given
    step = open_step(*of_step, run_forwards=of_outputs)
    if step.rank.facts.has_checks:
        raise ValueError(
            "engine='programs': a stage has a check (checkify.check), whose error JAX carries from "
            "one program to the next only within one; leave the check out, or use engine='scan'"
        )
    if any(missing) or (request.training and plan.keep == "input"):
        plan.lint.effects(step)
    program = ProgramStep(options, step)
    # A factor that is a number is a constant of a program; an array is an argument.
    once: Once = jax.tree.map(jax.typeof, step.once)
    unknown: Any = dict.fromkeys(once.factors)
    numbers = dataclasses.replace(step.rank.loss, **unknown)
    sums = {name: list(map(jax.typeof, of)) for name, of in program.get(program.refs).items()}
    stages, unsplit = _stages(program)
    bodies = [*step.activations.bodies, *([step.ends_body] * request.take_loss)]
    return Traced(
        operands=operands,
        known=step.without_arrays(numbers),
        once=once,
        sums=sums,
        stages_of_sums=program.stages_of_sums() if plan.stage_meshes else {},
        is_narrow=any(map(narrows, bodies)),
        needs_ratio=any(missing),
        stages=stages,
        unsplit=unsplit,
    )


def _stages(program: ProgramStep) -> tuple[list[list[StageTypes]], tuple[str, ...]]:
    """Return [K][N] the types of stages, by one trace for equal ones; also list failed splits."""
    options, step = program.options, program.step
    kinds = {action.kind for order in options.schedule.orders for action in order}
    known: dict[Any, StageTypes] = {}
    stages, unsplit, gathers = [], list[str](), False
    table = options.model.tables.embed  # -1 without a table that all ranks share
    scatters = options.request.training and table >= 0 and options.model.trained.ends[table]
    for k, position in enumerate(options.model.stages):
        ends, need = (k == 0, k == len(options.model.stages) - 1), step.needs[k]
        parts = []
        for part, (rank, of) in enumerate(step.by_slice):
            key = key_of_kind(rank, k, of.types, need), position.chunk, ends, part
            if key not in known:
                actions = program.actions(k, part, ActionValues({}), kinds)
                work = {name for name in kinds if actions.does_anything(options.op(name, k))}
                forward = options.op("F", k)
                if actions.leaves_nothing(forward) and not actions.writes_in_embed(forward):
                    work.discard("F")
                residuals, halves = actions.saved.residuals, actions.halves
                check_no_host(residuals.stashed if residuals else [], "stashes")
                check_no_host(halves.crossing if halves else [], "crossings")
                known[key] = StageTypes(
                    operand=of.types[k],
                    gradient=of.types[k + 1],
                    stash=residuals.stashed if residuals else [],
                    crossing=halves.crossing if halves else [],
                    carry=actions.kind.earlier,
                    carry_gradient=sums_of_carry(actions.kind.earlier),
                    actions=frozenset(work),
                    sends=need.x and (k > 0 or scatters),
                    representative=k,
                )
                unsplit += halves.whole if halves else []
                gathers |= bool(residuals and residuals.gathers)
            parts.append(known[key])
        stages.append(parts)
    if options.request.training and options.plan.remat == "gathered" and not gathers:
        warn_once(NOTHING_TO_GATHER, options.plan.compiled.warned, "gathered")
    return stages, tuple(dict.fromkeys(unsplit))


def work_of(ranks: Sequence[Traced]) -> Work:
    """Describe the work of a step; each stage's entry comes from the trace of its rank."""
    options = ranks[0].options
    stages = [ranks[rank].stages[k][0] for k, rank in enumerate(options.schedule.placement)]
    training = options.request.training
    kinds, sends = [stage.actions for stage in stages], [stage.sends for stage in stages]
    plan, windows = options.plan, ranks[0].windows
    return Work(kinds, sends, plan.keep, plan.offload if training else None, windows, plan.shared)
