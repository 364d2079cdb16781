"""A step of programs: they are compiled, and called in the order of the event clock.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pipeline.base.tree import Leaves, real
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Batch, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.programs.finish import FinishByRank, JoinedFinish, Results
from pipeline.core.programs.messages import lower_message
from pipeline.core.programs.program import (
    RankModel,
    RankProgram,
    action_program,
    begin_program,
    rank_models,
    reads_of,
    sums_of,
    writes_of,
)
from pipeline.core.programs.traced import StepInputs, StepOptions
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.results import totals_of
from pipeline.core.step.run.places import StepRequest
from pipeline.core.step.stores.totals import StepSums
from schedules.clocks.dispatch import dispatch_order
from schedules.core.action import Action
from schedules.lowering.program import Op

Key = tuple[str, int, int]  # a kind of value, the stage that reads it, a microbatch


@dataclass(frozen=True)
class Dispatch:
    """An action, and its values.

    Attributes:
      action: it.
      rank: the rank that runs it.
      program: the op, and the first stage that has the same program.
      sums: the names of the sums that it adds to.
      reads: by kind, a value that it reads, and whether no later action reads it.
      writes: by kind, a value that it writes.
    """

    action: Action
    rank: int
    program: tuple[Op, int]
    sums: tuple[str, ...]
    reads: Mapping[str, tuple[Key, bool]]
    writes: Mapping[str, Key]

    @property
    def ranks(self) -> tuple[int]:
        """The ranks whose processes call it, as of `Send`."""
        return (self.rank,)


@dataclass(frozen=True)
class Send:
    """A message.

    Attributes:
      ranks: the rank that sends, and the one that receives.
      key: its value.
      message: both ranks, the kind of the value, and the first stage that reads one of its type.
    """

    ranks: tuple[int, int]
    key: Key
    message: tuple[int, int, str, int]


class StepPrograms:
    """The compiled programs of a step.

    Args:
      options: of the step.
      weights: its state, or their types.
      batch: its batch, or types.
      given: by the caller.
      results: makes the results of the step.

    Attributes:
      schedule: the orders of ranks.
      ranks: [S] the model of each rank, the same of ranks whose meshes are alike.
      order: the calls of this process, in order.
      compiled: the functions that they call.
      ratio: forward actions that run before the step, if it needs the share of its loss.
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
        self.ranks = rank_models(options, weights, batch, given)
        if self.ranks[0].traced.needs_ratio:
            # The step needs its loss before it runs: all forwards run first, for that alone.
            self.ratio = _of_outputs(options, weights, batch)
            number = jax.ShapeDtypeStruct((), real())
            given = replace(given, ratio=(number, number))
            self.ranks = rank_models(options, weights, batch, given)
        if options.request.training:
            facts, traced = options.plan.facts, [of.traced for of in self.ranks]
            facts.unsplit = tuple(dict.fromkeys(part for of in traced for part in of.unsplit))
            facts.straight = False
        self.schedule = options.schedule
        self.meshes = self.ranks[0].operands.meshes
        local = set(self.meshes.local_ranks)
        self.order = [one for one in make_order(self.ranks) if local & set(one.ranks)]
        self.compiled = self._compile()
        finish = JoinedFinish if options.plan.stage_meshes is None else FinishByRank
        self._finish: JoinedFinish | FinishByRank = finish(self.ranks, results, self.compiled)
        numbers = list(np.arange(options.plan.schedule.num_units, dtype=np.int32))
        self._numbers = {rank: self.meshes.replicate(rank, numbers) for rank in local}

    def _compile(self) -> dict[Any, Any]:
        """The functions of this process's ranks, compiled by as many threads as there are cores."""
        programs: dict[Any, RankProgram] = {}
        lowered: dict[Any, Callable[[], Any]] = {}
        # JAX traces and lowers here, in one thread; XLA compiles in several.
        for rank in self.meshes.local_ranks:
            of, sums = self.ranks[rank], self.ranks[rank].traced.sums_on(rank)
            key = of, *sums
            if not jax.tree.leaves((sums, of.traced.factors)):
                lowered["begin", rank] = functools.partial(_begin_nothing, sums)
                continue
            if key not in programs:
                programs[key] = begin_program(of.traced, of.operands, sums)
            lowered["begin", rank] = programs[key].lower(rank)
        for one in self.order:
            if isinstance(one, Send):
                if one.message not in lowered:
                    source, target, kind, stage = one.message
                    ends = self.ranks[source], self.ranks[target]
                    lowered[one.message] = lower_message(*ends, source, target, kind, stage)
                continue
            of, key = self.ranks[one.rank], (self.ranks[one.rank], one.program, one.sums)
            if key not in programs:
                programs[key] = action_program(of.traced, of.operands, *one.program, one.sums)
            if (one.program, one.rank) not in lowered:
                lowered[one.program, one.rank] = programs[key].lower(one.rank)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(lambda run: run(), lowered.values())
            return dict(zip(lowered, compiled, strict=True))

    def __call__(self, weights: Weights, batch: Batch, given: StepInputs) -> Any:
        """Run the step: each program waits for its data, and this call for no result.

        Between processes a program waits for the messages before it too (`dispatch_order`).
        """
        if self.ratio is not None:
            given = replace(given, ratio=self.ratio(weights, batch, StepInputs()))
        meshes, compiled, numbers = self.meshes, self.compiled, self._numbers
        operands = self._finish.place(jax.tree.leaves((weights, batch, given)))
        sums, factors = {}, {}
        for rank in meshes.local_ranks:
            sums[rank], factors[rank] = compiled["begin", rank](operands[rank])
        values: dict[Key, Any] = {}
        for one in self.order:
            if isinstance(one, Send):
                received = compiled[one.message](values.pop(one.key, None))
                if received is not None:
                    values[one.key] = received
                continue
            rank = one.rank
            reads = {
                kind: values.pop(key) if is_last else values[key]
                for kind, (key, is_last) in one.reads.items()
            }
            added = {name: sums[rank][name] for name in one.sums}
            arguments = (
                added,
                reads,
                numbers[rank][one.action.microbatch],
                operands[rank],
                factors[rank],
            )
            added, left = compiled[one.program, rank](*arguments)
            sums[rank] |= added
            values |= {key: left[kind] for kind, key in one.writes.items()}
        return self._finish(operands, sums, factors)


def _begin_nothing(sums: dict[str, Leaves]) -> Callable[[Any], Any]:
    """The program before the first action of a rank that adds up nothing."""
    return lambda _: (sums, {})


def _of_outputs(options: StepOptions, weights: Weights, batch: Batch) -> StepPrograms:
    """Forward actions alone, for the share of a microbatch's loss and the mean."""
    model = replace(options.model, has_aux=None if options.model.has_aux else options.model.has_aux)
    forward = StepOptions(options.plan, model, StepRequest(training=False, take_loss=True))

    def results(
        plan: Plan, _: LocalModel, sums: StepSums, __: Weights
    ) -> tuple[jax.Array, jax.Array]:
        totals = totals_of(sums, plan)
        mean, share = mean_of(totals.loss, totals.weight)
        return share, mean

    last = options.plan.schedule.num_stages - 1
    of_loss = Results(results, (P(), P()), (last, last))
    return StepPrograms(forward, weights, batch, StepInputs(), of_loss)


def make_order(ranks: Sequence[RankModel]) -> list[Dispatch | Send]:
    """The actions and messages of all ranks, as they start under the event clock.

    So each rank runs in its own order, and every action comes after those that make its data. An
    action that computes nothing is left out: a W of a frozen stage, or the last stage's F if its
    backward runs it again.
    """
    options, schedule = ranks[0].traced.options, ranks[0].traced.options.schedule
    traced = [ranks[rank].traced for rank in schedule.placement]  # [K]
    calls = [
        call
        for call in dispatch_order(schedule)
        if call.action.kind in traced[call.action.stage].stages[call.action.stage].actions
    ]

    def read_by(action: Action) -> dict[str, Key]:
        stage, name, microbatch = action
        kinds = reads_of(traced[stage], options.op(name, stage), stage)
        return {kind: (kind, stage, microbatch) for kind in kinds}

    # The last reader of a value gives it up. A value without a reader is dropped.
    readers = ((n, call.action) for n, call in enumerate(calls) if call.target is None)
    last = {key: n for n, action in readers for key in read_by(action).values()}
    results: list[Dispatch | Send] = []
    for n, (action, rank, target) in enumerate(calls):
        stage, name, microbatch = action
        of, op = traced[stage], options.op(name, stage)
        keys = {kind: (kind, to, microbatch) for kind, to in writes_of(of, op, stage).items()}
        writes = {kind: key for kind, key in keys.items() if key in last}
        if target is None:
            reads = {kind: (key, last[key] == n) for kind, key in read_by(action).items()}
            program, sums = (op, of.stages[stage].representative), sums_of(of, op, rank)
            results.append(Dispatch(action, rank, program, sums, reads, writes))
            continue
        for kind, to, _ in writes.values():
            if schedule.placement[to] == target:
                like = traced[to].stages[to].representative
                key = kind, to, microbatch
                results.append(Send((rank, target), key, (rank, target, kind, like)))
    return results
