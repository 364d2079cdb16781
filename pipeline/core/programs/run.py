"""A step of programs: they are compiled, and dispatched in the order of the event clock.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pipeline.base.tree import real
from pipeline.core.model.loss import mean_of
from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.meshes import RankMeshes, drop_device_axis
from pipeline.core.programs.program import (
    RankProgram,
    action_program,
    begin_program,
    find_operands,
    reads_of,
    sums_of,
    trace_model,
    without_warnings_of_donation,
    writes_of,
)
from pipeline.core.programs.traced import StepInputs, StepOptions, Traced
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.results import totals_of
from pipeline.core.step.run.places import StepRequest
from pipeline.core.step.stores.totals import StepSums
from schedules.core.action import Action
from schedules.core.events import run as start_times
from schedules.lowering.program import Op

Key = tuple[str, int, int]  # a kind of value, the stage that reads it, a microbatch
Results = Callable[[LocalModel, StepSums, Weights], Any]


@dataclass(frozen=True)
class Dispatch:
    """An action, and where its values come from and go to.

    Attributes:
      rank: the rank that runs it.
      program: the op, and the first stage that has the same program.
      microbatch: its number.
      sums: the names of the sums that it adds to.
      reads: by kind, a value that it reads, and whether no later action reads it.
      writes: by kind, a value that it writes, and the sharding to which it is sent; None if the
        rank keeps it.
    """

    rank: int
    program: tuple[Op, int]
    microbatch: int
    sums: tuple[str, ...]
    reads: Mapping[str, tuple[Key, bool]]
    writes: Mapping[str, tuple[Key, Any]]


class StepPrograms:
    """The compiled programs of a step.

    Args:
      options: of the step.
      weights: its state, or their types.
      batch: its batch, or types.
      given: by the caller.
      results: makes the results of the step from the sums of a rank, on the pipeline's mesh.
      out_specs: the specs of the results.
    """

    def __init__(
        self,
        options: StepOptions,
        weights: Weights,
        batch: Batch,
        given: StepInputs,
        results: Results,
        out_specs: Any,
    ) -> None:
        self._ratio: StepPrograms | None = None
        self.operands = find_operands(options, weights, batch, given)
        self.traced = trace_model(self.operands)
        if self.traced.needs_ratio:
            # The step needs its loss before it runs: all forwards run first, for that alone.
            self._ratio = _of_outputs(options, weights, batch)
            number = jax.ShapeDtypeStruct((), real())
            given = replace(given, ratio=(number, number))
            self.operands = find_operands(options, weights, batch, given)
            self.traced = trace_model(self.operands)
        if options.request.training:
            options.plan.facts.unsplit, options.plan.facts.straight = self.traced.unsplit, False
        self.meshes = self.operands.meshes
        self.order = make_order(self.traced, self.meshes)
        self.compiled = self._compile()
        self._finish = self._lower_finish(results, out_specs).compile()
        numbers = list(np.arange(options.plan.schedule.num_units, dtype=np.int32))
        self._numbers = [
            self.meshes.replicate(rank, numbers) for rank in range(len(self.meshes.ranks))
        ]

    def _compile(self) -> dict[tuple[Any, int], Any]:
        """The functions of each rank, compiled by as many threads as there are cores."""
        programs: dict[Any, RankProgram] = {"begin": begin_program(self.traced, self.operands)}
        wanted: dict[Any, None] = {("begin", r): None for r in range(len(self.meshes.ranks))}
        for one in self.order:
            if one.program not in programs:
                programs[one.program] = action_program(self.traced, self.operands, *one.program)
            wanted[one.program, one.rank] = None

        # JAX traces and lowers here, in one thread; XLA compiles in several.
        compiles = [programs[program].lower(rank) for program, rank in wanted]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(wanted, threads.map(lambda run: run(), compiles), strict=True))

    def _lower_finish(self, results: Results, out_specs: Any) -> jax.stages.Lowered:
        """The program after the last action, on the mesh of the pipeline."""
        traced, plan = self.traced, self.traced.options.plan

        def finish(leaves: list[Any], sums: Any, factors: Any) -> Any:
            weights, batch, _ = self.operands.of(leaves)
            step = traced.opened(weights, batch, drop_device_axis(factors))
            step.put(drop_device_axis(sums))
            return results(step.inspected.local(), step.sums, weights)

        of_values = self.meshes.value_specs((traced.sums, traced.factors))
        run = jax.shard_map(
            finish,
            mesh=plan.mesh,
            in_specs=(self.operands.manual, *of_values),
            out_specs=out_specs,
            axis_names=plan.axes.manual,
            check_vma=plan.tracks_varying,
        )
        of_values = self.meshes.value_types((traced.sums, traced.factors), joined=True)
        types = self.operands.whole_types, *of_values
        return without_warnings_of_donation(jax.jit(run, donate_argnums=1).trace(*types).lower)

    def __call__(self, weights: Weights, batch: Batch, given: StepInputs) -> Any:
        """Run the step: each program waits for its data alone, and this call for no result."""
        if self._ratio is not None:
            given = replace(given, ratio=self._ratio(weights, batch, StepInputs()))
        meshes, compiled, numbers = self.meshes, self.compiled, self._numbers
        leaves = meshes.placed(jax.tree.leaves((weights, batch, given)), self.operands.specs)
        operands = meshes.split(leaves, self.operands.specs)
        began = [compiled["begin", rank](of) for rank, of in enumerate(operands)]
        sums, factors = map(list, zip(*began, strict=True))
        values: dict[Key, Any] = {}
        for one in self.order:
            rank = one.rank
            reads = {
                kind: values.pop(key) if is_last else values[key]
                for kind, (key, is_last) in one.reads.items()
            }
            added = {name: sums[rank][name] for name in one.sums}
            arguments = added, reads, numbers[rank][one.microbatch], operands[rank], factors[rank]
            added, left = compiled[one.program, rank](*arguments)
            sums[rank] |= added
            for kind, (key, elsewhere) in one.writes.items():
                value = left[kind]
                values[key] = value if elsewhere is None else jax.device_put(value, elsewhere)
        return self._finish(leaves, meshes.join(sums), meshes.join(factors))


def _of_outputs(options: StepOptions, weights: Weights, batch: Batch) -> StepPrograms:
    """Forward actions alone, for the share of a microbatch's loss and the mean."""
    model = replace(options.model, has_aux=None if options.model.has_aux else options.model.has_aux)
    forward = StepOptions(options.plan, model, StepRequest(training=False, take_loss=True))

    def results(_: LocalModel, sums: StepSums, __: Weights) -> tuple[jax.Array, jax.Array]:
        totals = totals_of(sums, options.plan)
        mean, share = mean_of(totals.loss, totals.weight)
        return share, mean

    return StepPrograms(forward, weights, batch, StepInputs(), results, (P(), P()))


def make_order(traced: Traced, meshes: RankMeshes) -> list[Dispatch]:
    """The actions of all ranks, in the order in which they start under the event clock.

    So each rank runs in its own order, and every action comes after those that make its data. An
    action that computes nothing is left out: a W of a frozen stage, or the last stage's F if its
    backward runs it again.
    """
    options, schedule = traced.options, traced.options.schedule
    starts = start_times(schedule)
    actions = sorted(
        (float(starts[rank][n]), rank, n, action)
        for rank, order in enumerate(schedule.orders)
        for n, action in enumerate(order)
        if action.kind in traced.stages[action.stage].actions
    )

    def read_by(action: Action) -> dict[str, Key]:
        stage, name, microbatch = action
        kinds = reads_of(traced, options.op(name, stage), stage)
        return {kind: (kind, stage, microbatch) for kind in kinds}

    # The last reader of a value gives it up. A value without a reader is dropped.
    last = {key: n for n, (*_, action) in enumerate(actions) for key in read_by(action).values()}
    results = []
    for n, (_, rank, _, action) in enumerate(actions):
        stage, name, microbatch = action
        types, op, writes = traced.stages[stage], options.op(name, stage), {}
        for kind, to in writes_of(traced, op, stage).items():
            reader, key = schedule.placement[to], (kind, to, microbatch)
            if key in last:
                message = getattr(traced.stages[to], kind)
                stays = reader == rank
                writes[kind] = key, None if stays else meshes.value_shardings(reader, message)
        reads = {kind: (key, last[key] == n) for kind, key in read_by(action).items()}
        program = op, types.representative
        results.append(Dispatch(rank, program, microbatch, sums_of(traced, op), reads, writes))
    return results
