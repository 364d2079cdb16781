"""A step of programs, which are compiled and then called in the order of the event clock.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from collectives.transfer import waits
from pipeline.base.tree import real
from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.finish import FinishByRank, JoinedFinish, Results
from pipeline.core.programs.messages import lower_message
from pipeline.core.programs.operands import StepOptions
from pipeline.core.programs.program import RankProgram, action_program, begin_program
from pipeline.core.programs.traced import trace_ranks, work_of
from pipeline.core.step.calls.opened import StepInputs
from pipeline.core.step.calls.rank import StepRequest
from pipeline.core.step.share import share_of
from schedules.lowering.dispatch import Send, Value, calls_of


class StepPrograms:
    """The compiled programs of a step.

    Args:
      weights: the pipeline's state, or its types.
      given: the inputs of the step in addition to weights and batch, or their types.

    Attributes:
      ranks: [S] the facts from a trace of the model; ranks with equal meshes share them.
      compiled: the functions to call, by ("begin", rank), by (kind of action, stage), and for
        messages by (kind of value, stage that reads the value).
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
        self.schedule = options.schedule
        self.meshes = self.ranks[0].operands.meshes
        local = set(self.meshes.local_ranks)
        calls = calls_of(self.schedule, work_of(self.ranks))
        self.order = [one for one in calls if local & set(one.ranks)]
        # By kind and stage of an action, the names of the sums to which it adds.
        self._sums: dict[tuple[str, int], tuple[str, ...]] = {}
        self._made: dict[tuple[str, int], tuple[str, ...]] = {}  # weights made once that it reads
        self.compiled = self._compile()
        finish = JoinedFinish if options.plan.stage_meshes is None else FinishByRank
        self._finish: JoinedFinish | FinishByRank = finish(self.ranks, results, self.compiled)
        numbers = list(np.arange(options.plan.schedule.num_units, dtype=np.int32))
        self._numbers = {rank: self.meshes.replicate(rank, numbers) for rank in local}
        self._waits = {rank: waits(self.meshes.ranks[rank]) for rank in local}

    def _compile(self) -> dict[tuple[str, int], Any]:
        """Compile the functions of this process's ranks, with one thread per core."""
        programs: dict[Any, RankProgram] = {}
        lowered: dict[Any, Callable[[], Any]] = {}
        key_of: dict[tuple[str, int], Any] = {}  # by name, the key in `lowered`

        def add(name: tuple[str, int], rank: int, key: Any, make: Any, *given: Any) -> None:
            if key not in programs:
                programs[key] = make(*given)
            if (key, rank) not in lowered:
                lowered[key, rank] = programs[key].lower(rank)
            key_of[name] = key, rank

        # JAX traces and lowers here, in one thread; XLA compiles in several.
        for rank in self.meshes.local_ranks:
            traced = self.ranks[rank]
            names = tuple(traced.sums_on(rank))
            add(("begin", rank), rank, (traced, names), begin_program, traced, names)
        for one in self.order:
            if isinstance(one, Send):
                (source, target), (kind, stage, _) = one.ranks, one.value
                like = self.ranks[target].stages[stage].representative
                key_of[kind, stage] = source, target, kind, like
                if key_of[kind, stage] not in lowered:
                    message = lower_message(self.ranks, source, target, kind, stage)
                    lowered[key_of[kind, stage]] = message
                continue
            stage, kind, _ = one.action
            if (kind, stage) not in key_of:
                traced, op = self.ranks[one.rank], self.ranks[one.rank].options.op(kind, stage)
                names = self._sums[kind, stage] = traced.sums_of(op, one.rank)
                self._made[kind, stage] = tuple(traced.made_of(op.chunk))
                like = traced.stages[stage].representative
                key = traced, op, like, names, tuple(one.reads), tuple(one.writes)
                add((kind, stage), one.rank, key, action_program, *key)
        # Other threads do not see a context of this one.
        is_logged = jax.config.jax_log_compiles  # type: ignore[attr-defined]

        def compile_one(run: Callable[[], Any]) -> Any:
            with jax.log_compiles(is_logged):
                return run()

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(compile_one, lowered.values())
            functions = dict(zip(lowered, compiled, strict=True))
        return {name: functions[key] for name, key in key_of.items()}

    @jax.disable_jit(False)  # its functions are compiled
    def __call__(self, weights: Weights, batch: Batch, given: StepInputs) -> Any:
        """Run the step. Each program waits for its data; this call waits for no result.

        With several processes, a program also waits for earlier messages (`dispatch_order`). On
        CPUs the call then waits for programs of several processes (`collectives.transfer.waits`).
        """
        if self.ratio is not None:
            given = replace(given, ratio=self.ratio(weights, batch, StepInputs()))
        meshes, numbers = self.meshes, self._numbers
        operands = self._finish.place(jax.tree.leaves((weights, batch, given)))
        sums, shared, made = {}, {}, {}
        for rank in meshes.local_ranks:
            sums[rank], shared[rank] = self._run(("begin", rank), rank, operands[rank])
            made[rank] = {name: sums[rank].pop(name) for name in self.ranks[rank].made}
        values: dict[Value, Any] = {}
        for one in self.order:
            if isinstance(one, Send):
                received = self.compiled[one.value[:2]](values.pop(one.value, None))
                if received is not None:
                    values[one.value] = received
                continue
            rank, (stage, kind, microbatch) = one.rank, one.action
            reads = {
                name: values.pop(value) if is_last else values[value]
                for name, (value, is_last) in one.reads.items()
            }
            added = {name: sums[rank][name] for name in self._sums[kind, stage]}
            of_stage = {name: made[rank][name] for name in self._made[kind, stage]}
            of_rank = numbers[rank][microbatch], operands[rank], shared[rank], of_stage
            added, left = self._run((kind, stage), rank, added, reads, *of_rank)
            sums[rank] |= added
            values |= {value: left[name] for name, value in one.writes.items()}
        return self._finish(operands, sums, shared)

    def _run(self, name: tuple[str, int], rank: int, *given: Any) -> Any:
        results = self.compiled[name](*given)
        return jax.block_until_ready(results) if self._waits[rank] else results


def _of_outputs(options: StepOptions, weights: Weights, batch: Batch) -> StepPrograms:
    """Make a step of only forward actions, for a microbatch's share of the loss and the mean."""
    model = replace(options.model, has_aux=options.model.has_aux and None)
    forward = StepOptions(options.plan, model, StepRequest(training=False, take_loss=True))
    results = lambda step, sums, _: share_of(sums, step.plan)  # noqa: E731
    last = options.plan.schedule.num_stages - 1
    of_loss = Results(results, (P(), P()), (last, last))
    return StepPrograms(forward, weights, batch, StepInputs(), of_loss)
