"""A step of programs, which are compiled and then called in the order of the event clock.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from collectives.compat import HOST_MEMORY
from collectives.transfer import waits
from pipeline.base.tree import Leaves, real
from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.finish import FinishByRank, JoinedFinish, Results
from pipeline.core.programs.messages import lower_message, move
from pipeline.core.programs.operands import StepOptions
from pipeline.core.programs.program import (
    StepProgram,
    Where,
    action_program,
    begin_program,
    gather_program,
    joint_program,
)
from pipeline.core.programs.traced import trace_ranks, work_of
from pipeline.core.step.calls.opened import StepInputs
from pipeline.core.step.calls.rank import StepRequest
from pipeline.core.step.ranks import deal
from pipeline.core.step.share import share_of
from schedules.core.action import unit_of
from schedules.lowering.dispatch import AnyCall, Dispatch, Gather, Joint, Send, Value, calls_of

Name = tuple[str, int, int]  # of a function


@dataclass
class _StepState:
    """The arrays of a step that runs.

    Attributes:
      taken: by program and rank, the operands that the program reads.
      sums: by rank; for None the sums, joined, to which only work of all ranks adds.
      shared: by rank, what the step computes once (`Traced.shared`); for None joined.
      made: by rank and name, the weights that the step makes; for None those of the ends, joined.
      values: the values that later calls read.
    """

    taken: dict[tuple[StepProgram, Where], Leaves]
    sums: dict[Where, Any] = field(default_factory=dict)
    shared: dict[Where, Any] = field(default_factory=dict)
    made: dict[Where, dict[str, Any]] = field(default_factory=dict)
    values: dict[Value, Any] = field(default_factory=dict)


class StepPrograms:
    """The programs of a step, which the first call compiles.

    Args:
      weights: the pipeline's state, or its types.
      given: the inputs of the step in addition to weights and batch, or their types.

    Attributes:
      ranks: [S] the facts from a trace of the model; ranks with equal meshes share them.
      order: the calls of this process, in order.
      programs: the programs of this process's ranks with the rank, by ("begin", rank, 0), and by
        `name_of` for gathers, actions, and, without a rank, work of all ranks.
      compiled: the functions to call, by the same names, and for messages by `name_of`.
      ratio: the step of forward actions that runs before this step to compute the share of its
        loss; None if the step needs no share.
    """

    def __init__(
        self,
        options: StepOptions,
        weights: Weights,
        batch: Batch,
        given: StepInputs,
        results: Results,
    ) -> None:
        self.ratio: StepPrograms | None = None
        self.ranks = trace_ranks(options, weights, batch, given)
        if self.ranks[0].needs_ratio:
            # The step needs its loss before it runs: all forwards run first, only to compute it.
            self.ratio = _of_outputs(options, weights, batch)
            number = jax.ShapeDtypeStruct((), real())
            given = replace(given, ratio=(number, number))
            self.ranks = trace_ranks(options, weights, batch, given)
        if options.request.training:
            facts = options.plan.facts
            facts.unsplit = tuple(dict.fromkeys(part for of in self.ranks for part in of.unsplit))
            facts.straight = False
        self._plan, self.schedule = options.plan, options.schedule
        self.meshes = self.ranks[0].operands.meshes
        local = set(self.meshes.local_ranks)
        calls = calls_of(self.schedule, work_of(self.ranks))
        self.order = [one for one in calls if local & set(one.ranks)]
        # By name of an action, the names of the sums to which it adds.
        self._sums: dict[Name, tuple[str, ...]] = {}
        self._made_for: dict[Name, tuple[str, ...]] = {}  # and of the weights made that it reads
        # With ``stage_meshes`` each stage is a chunk of the model.
        self.chunk_of = [stage.chunk for stage in options.model.stages]
        # By rank, the chunks whose weights are made before the first action, and not by a gather;
        # "ends" are those of embed and head.
        self._made_first: list[tuple[int | str, ...]] = [
            () if self.ranks[0].windows else tuple(self.chunk_of[k] for k in of)
            for of in self.schedule.stages_of
        ]
        for rank, of in enumerate(self._made_first):
            if self.ranks[rank].made_of("ends") and self.ranks[rank].reads_ends(rank):
                self._made_first[rank] = *of, "ends"
        self.programs = self._list_programs()
        joint = {self.name_of(one) for one in self.order if isinstance(one, Joint)}
        self._has_joint = bool(joint)
        # The sums to which only work of all ranks adds stay joined during a step.
        by_ranks = {of for name in self._sums.keys() - joint for of in self._sums[name]}
        self._only_joint = {of for name in joint for of in self._sums[name]} - by_ranks
        self.compiled: dict[Name, Any] = {}
        finish = JoinedFinish if options.plan.stage_meshes is None else FinishByRank
        self._finish: JoinedFinish | FinishByRank = finish(self.ranks, results)

    def _list_programs(self) -> dict[Name, tuple[StepProgram, Where]]:
        known: dict[Any, StepProgram] = {}
        programs: dict[Name, tuple[StepProgram, Where]] = {}

        def add(name: Name, rank: Where, make: Callable[..., StepProgram], *of: Any) -> None:
            if (make, *of) not in known:
                known[make, *of] = make(*of)
            programs[name] = known[make, *of], rank

        for rank in self.meshes.local_ranks:
            names = tuple(self.ranks[rank].sums_on(rank))
            first = self._made_first[rank]
            add(("begin", rank, 0), rank, begin_program, self.ranks[rank], names, first)
        for one in self.order:
            if isinstance(one, Send):
                continue
            name = self.name_of(one)
            if isinstance(one, Joint):
                names = self._sums[name] = self.ranks[0].sums_of_joint(one.part)
                add(name, None, joint_program, self.ranks[0], one.part, names, one.makes)
                continue
            traced = self.ranks[one.rank]
            if isinstance(one, Gather):
                add(name, one.rank, gather_program, traced, self.chunk_of[one.stage])
            elif name not in programs:
                kind, stage, part = name
                op = traced.options.op(kind, stage)
                names = self._sums[name] = traced.sums_of(op, one.rank)
                self._made_for[name] = tuple(traced.made_for(op))
                like = traced.stages[stage][part].representative
                reads = tuple((read, is_last) for read, (_, is_last) in one.reads.items())
                of_action = traced, op, like, part, names, reads, tuple(one.writes)
                add(name, one.rank, action_program, *of_action)
        return programs

    def lower(self) -> list[jax.stages.Lowered]:
        """Lower each program once, for the first of its ranks; messages are left out."""
        ranks: dict[StepProgram, Where] = {}
        for program, rank in self.programs.values():
            ranks.setdefault(program, rank)
        before = [] if self.ratio is None else self.ratio.lower()
        of_ranks = [program.lower_on(rank) for program, rank in ranks.items()]
        return [*before, *of_ranks, *self._finish.lower()]

    def compile(self) -> StepPrograms:
        """Compile the functions of this process's ranks once, with one thread per core."""
        if self.compiled:
            return self
        if self.ratio is not None:
            self.ratio.compile()
        # JAX traces and lowers here, in one thread; XLA compiles in several.
        key_of: dict[Name, Any] = dict(self.programs)
        pairs = dict.fromkeys(self.programs.values())
        on_ranks = {program: program.lower() for program in dict.fromkeys(p for p, _ in pairs)}
        lowered: dict[Any, Callable[[], Any]] = {
            (program, rank): on_ranks[program](rank) for program, rank in pairs
        }
        for one in self.order:
            if isinstance(one, Send):
                (source, target), name = one.ranks, self.name_of(one)
                kind, stage, part = name
                like = self.ranks[target].stages[stage][part].representative
                key_of[name] = key = source, target, kind, like, part
                if key not in lowered:
                    lowered[key] = lower_message(self.ranks, source, target, name)
        # Other threads do not see a context of this one.
        is_logged = jax.config.jax_log_compiles  # type: ignore[attr-defined]

        def compile_one(run: Callable[[], Any]) -> Any:
            with jax.log_compiles(is_logged):
                return run()

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(compile_one, lowered.values())
            functions = dict(zip(lowered, compiled, strict=True))
        self.compiled = {name: functions[key] for name, key in key_of.items()}
        self._finish.compile(list(self.programs.values()))
        numbers = list(np.arange(self.schedule.num_units, dtype=np.int32))
        local, places = self.meshes.local_ranks, list[Where](self.meshes.local_ranks)
        self._waits: dict[Where, bool] = {rank: waits(self.meshes.ranks[rank]) for rank in local}
        if self._has_joint:
            places.append(None)
            # On CPUs the launch of a program of all devices must find no program in flight, even
            # in one process: `waits` explains it.
            self._waits[None] = self._plan.mesh.devices.flat[0].platform == "cpu"
            self._blank = {rank: self.meshes.zeros(rank, self.ranks[0].wire) for rank in local}
        self._numbers = {place: self.meshes.replicate(place, numbers) for place in places}
        return self

    @jax.disable_jit(False)  # its functions are compiled
    def __call__(self, weights: Weights, batch: Batch, given: StepInputs) -> Any:
        """Run the step. Each program waits for its data; this call waits for no result.

        With several processes, a program also waits for earlier messages (`dispatch_order`). On
        CPUs the call then waits for programs of several processes (`collectives.transfer.waits`).
        """
        self.compile()
        if self.ratio is not None:
            given = replace(given, ratio=self.ratio(weights, batch, StepInputs()))
        batch = deal(self._plan, batch)
        operands = self._finish.place(jax.tree.leaves((weights, batch, given)))
        taken = {
            (program, rank): [operands[rank][n] for n in program.reads]
            for program, rank in dict.fromkeys(self.programs.values())
        }
        state = _StepState(taken)
        for rank in self.meshes.local_ranks:
            self._begin(rank, state)
        if self._plan.stage_meshes is None:
            state.shared[None] = self.meshes.join(state.shared.values())
            only = [{of: sums.pop(of) for of in self._only_joint} for sums in state.sums.values()]
            state.sums[None] = self.meshes.join(only)
        if self._has_joint:
            names = self.ranks[0].made_of("ends")
            parts = [{of: made[of] for of in names} for made in state.made.values()]
            state.made[None] = self.meshes.join(parts)
        for one in self.order:
            if isinstance(one, Dispatch):
                self._run_action(one, state)
            elif isinstance(one, Send):
                received = self.compiled[self.name_of(one)](state.values.pop(one.value, None))
                if received is not None:
                    state.values[one.value] = received
            elif isinstance(one, Joint):
                self._run_together(one, state)
            else:
                self._gather(one, state)
        return self._finish(operands, state.sums, state.shared)

    def _begin(self, rank: int, state: _StepState) -> None:
        name = "begin", rank, 0
        state.sums[rank], state.shared[rank] = self._run(name, rank, self._taken(name, state))
        names = (name for part in self._made_first[rank] for name in self.ranks[rank].made_of(part))
        state.made[rank] = {name: state.sums[rank].pop(name) for name in names}

    def _gather(self, one: Gather, state: _StepState) -> None:
        name, made = self.name_of(one), state.made[one.rank]
        if one.replaced >= 0:
            for of in self.ranks[one.rank].made_of(self.chunk_of[one.replaced]):
                del made[of]
        made |= self._run(name, one.rank, self._taken(name, state))

    def _run_action(self, one: Dispatch, state: _StepState) -> None:
        rank, name, values = one.rank, self.name_of(one), state.values
        for value in one.to_device:
            values[value] = move(values[value], None)
        last, kept = dict[str, Any](), dict[str, Any]()
        for read, (value, is_last) in one.reads.items():
            (last if is_last else kept)[read] = values.pop(value) if is_last else values[value]
        added = {of: state.sums[rank][of] for of in self._sums[name]}
        made = {of: state.made[rank][of] for of in self._made_for[name]}
        unit = self._numbers[rank][unit_of(one.action, self.schedule.num_slices)]
        of_rank = unit, self._taken(name, state), state.shared[rank], made
        added, left = self._run(name, rank, added, last, kept, *of_rank)
        state.sums[rank] |= added
        values |= {value: left[of] for of, value in one.writes.items()}
        for value in one.to_host:
            values[value] = move(values[value], HOST_MEMORY)

    def _run_together(self, one: Joint, state: _StepState) -> None:
        """Run work of all ranks, on their sums and on the value of one of them."""
        name, meshes, ranks, joined = self.name_of(one), self.meshes, self.meshes.local_ranks, []
        if one.part != "lookup":
            value = state.values.pop(one.value, None)
            joined = [meshes.join(value if r == one.owner else self._blank[r] for r in ranks)]
        if self._waits[None]:
            made = [*state.made.values(), joined]
            jax.block_until_ready([*state.sums.values(), *state.values.values(), *made])
        names, whole = self._sums[name], state.sums[None]
        parts = [of for of in names if of not in whole]
        added = meshes.join({of: state.sums[rank][of] for of in parts} for rank in ranks)
        added |= {of: whole[of] for of in names if of in whole}
        once = state.shared[None], state.made[None]
        of_step = self._numbers[None][one.value[2]], self._taken(name, state), *once
        added, made = self._run(name, None, added, joined, *of_step)
        of_ranks = {of: added.pop(of) for of in parts}
        whole |= added
        for rank in ranks:
            state.sums[rank] |= meshes.part_on(rank, of_ranks)
        if one.makes and one.owner in ranks:
            state.values[one.value] = meshes.part_on(one.owner, made[0])

    def _taken(self, name: Name, state: _StepState) -> Leaves:
        return state.taken[self.programs[name]]

    def name_of(self, one: AnyCall | Gather) -> Name:
        """Return (kind, stage that runs or reads, slice).

        Of a gather it is ("gather", rank, stage), of work of all ranks (part, stage, 0).
        """
        if isinstance(one, Gather):
            return "gather", one.rank, one.stage
        if isinstance(one, Joint):
            return one.part, one.value[1], 0
        if isinstance(one, Send):
            kind, stage, unit = one.value
            return kind, stage, unit % self.schedule.num_slices
        return one.action.kind, one.action.stage, one.action.slice or 0

    def _run(self, name: Name, rank: Where, *given: Any) -> Any:
        results = self.compiled[name](*given)
        return jax.block_until_ready(results) if self._waits[rank] else results


def _of_outputs(options: StepOptions, weights: Weights, batch: Batch) -> StepPrograms:
    """Make a step of only forward actions, for a microbatch's share of the loss and the mean."""
    model = replace(options.model, has_aux=options.model.has_aux and None)
    forward = StepOptions(options.plan, model, StepRequest(training=False, take_loss=True))
    results = lambda step, sums, _: share_of(sums, step.plan)  # noqa: E731
    last = options.plan.schedule.num_stages - 1
    of_loss = Results(results, (P(), P()), (last, last), numbers=True)
    return StepPrograms(forward, weights, batch, StepInputs(), of_loss)
