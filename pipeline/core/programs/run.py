"""A step of programs: they are compiled, and dispatched in the order of the event clock.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.meshes import entered
from pipeline.core.programs.program import (
    find_operands,
    leaves_of,
    lower_action,
    lower_begin,
    reads_of,
    sums_of,
    trace_model,
)
from pipeline.core.programs.traced import StepKind, Traced
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.run.places import make_sums
from pipeline.core.step.stores.totals import StepSums
from schedules.core.events import run as starts_of_actions

Key = tuple[str, int, int]  # a kind of value, the stage that reads it, a microbatch
Results = Callable[[LocalModel, StepSums, Weights], Any]


@dataclass(frozen=True)
class Dispatch:
    """An action, and where its values come from and go to.

    Attributes:
      rank: of its stage; program: a key of the compiled functions.
      microbatch: its number.
      reads: by kind, the values that it reads, and whether it is the last to do so.
      leaves: by name, the values that it leaves, and the rank that reads each.
      sums: names of the sums that it adds to.
    """

    rank: int
    program: Any
    microbatch: int
    reads: Mapping[str, tuple[Key, bool]]
    leaves: Mapping[str, tuple[Key, int]]
    sums: tuple[str, ...]


class Programs:
    """The compiled programs of a step.

    Args:
      kind: the step.
      weights, batch, scale: its operands, or their types.
      results: makes the results of the step from the sums of each rank, on the pipeline's mesh.
      out_specs: the specs of the results.
    """

    def __init__(
        self,
        kind: StepKind,
        weights: Weights,
        batch: Batch,
        scale: Any,
        results: Results,
        out_specs: Any,
    ) -> None:
        self.operands = find_operands(kind, weights, batch, scale)
        self.meshes = self.operands.meshes
        self.traced = trace_model(kind, self.operands)
        self.order = make_order(self.traced)
        self._compiled = self._compile()
        self._finish = self._make_finish(results, out_specs)
        counts = range(kind.plan.schedule.num_units)
        numbers = [np.int32(m) for m in counts]
        self._numbers = [self.meshes.same(rank, numbers) for rank in range(len(self.meshes.ranks))]

    def _compile(self) -> dict[tuple[Any, int], Any]:
        """The functions of all ranks, compiled by as many threads as there are cores."""
        lowered = {"begin": lower_begin(self.traced, self.operands)}
        wanted = [("begin", rank) for rank in range(len(self.meshes.ranks))]
        for one in self.order:
            op, stage, _ = one.program
            if one.program not in lowered:
                lowered[one.program] = lower_action(self.traced, self.operands, op, stage)
            wanted.append((one.program, one.rank))
        wanted = list(dict.fromkeys(wanted))

        def compiled(key: tuple[Any, int]) -> Any:
            program, rank = key
            return lowered[program].compile(device_assignment=self.meshes.devices(rank))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(wanted, threads.map(compiled, wanted), strict=True))

    def _make_finish(self, results: Results, out_specs: Any) -> Any:
        """The program after the last action, on the mesh of the pipeline."""
        traced, plan = self.traced, self.traced.kind.plan

        def body(weights: Weights, batch: Batch, factors: Any, arrays: Any) -> Any:
            inspected = traced.on_rank(weights, batch, entered(factors))
            local = inspected.local()
            sums = make_sums(local, traced.kind.request, plan.schedule.num_units)
            for name, refs in sums.refs.items():
                for ref, array in zip(refs, entered(arrays[name]), strict=True):
                    ref[...] = array
            return results(local, sums, weights)

        of_values = self.meshes.value_specs((traced.factors, traced.sums))
        run = jax.shard_map(
            body,
            mesh=plan.mesh,
            in_specs=(*self.operands.specs[:2], *of_values),
            out_specs=out_specs,
            axis_names=plan.axes.manual,
            check_vma=plan.tracks_varying,
        )
        return jax.jit(run, donate_argnums=3)

    def __call__(self, weights: Weights, batch: Batch, scale: Any) -> Any:
        """Run the step; nothing waits for a result."""
        meshes, compiled = self.meshes, self._compiled
        specs = self.operands.specs
        parts = map(meshes.split, (weights, batch, scale), specs)
        operands = list(zip(*parts, strict=True))
        began = [compiled["begin", rank](*of) for rank, of in enumerate(operands)]
        factors, sums = [of for of, _ in began], [of for _, of in began]
        values: dict[Key, Any] = {}
        for one in self.order:
            rank = one.rank
            given = {
                name: values.pop(key) if is_last else values[key]
                for name, (key, is_last) in one.reads.items()
            }
            mine = {name: sums[rank].pop(name) for name in one.sums}
            of_weights, of_batch, _ = operands[rank]
            number = self._numbers[rank][one.microbatch]
            added, made = compiled[one.program, rank](
                mine, given, number, of_weights, of_batch, factors[rank]
            )
            sums[rank] |= added
            for name, (key, reader) in one.leaves.items():
                values[key] = made[name] if reader == rank else meshes.sent(made[name], reader)
        return self._finish(weights, batch, meshes.join(factors), meshes.join(sums))


def make_order(traced: Traced) -> list[Dispatch]:
    """The actions of all ranks as they start under the event clock, which leaves out none's data.

    What computes nothing is not dispatched: a W of a frozen stage, or the last stage's F where its
    backward runs it again.
    """
    kind = traced.kind
    schedule = kind.schedule
    starts = starts_of_actions(schedule)
    actions = [
        (float(start), rank, n, action)
        for rank, order in enumerate(schedule.orders)
        for n, (start, action) in enumerate(zip(starts[rank], order, strict=True))
    ]
    order = []
    for _, rank, _, action in sorted(actions, key=lambda one: one[:3]):
        stage, microbatch = action.stage, action.microbatch
        types, op = traced.stages[stage], kind.op(action.kind, stage)
        if action.kind not in types.work:
            continue
        reads = {name: (name, stage, microbatch) for name in reads_of(traced, op)}
        leaves = {}
        for name in leaves_of(traced, op, stage):
            if name == "sent":
                to, key = stage + 1, "operand"
            elif name == "operand":
                to, key = stage - 1, "gradient"
            else:
                to, key = stage, name
            leaves[name] = (key, to, microbatch), schedule.placement[to]
        program = op, traced.stages.index(types), types.code
        sums = sums_of(traced, op)
        order.append((rank, program, microbatch, reads, leaves, sums))
    return _with_lives(order)


def _with_lives(order: list[Any]) -> list[Dispatch]:
    """The actions with the last reader of each value; what nobody reads is dropped."""
    reader: dict[Key, int] = {}
    for n, (_, _, _, reads, _, _) in enumerate(order):
        reader |= dict.fromkeys(reads.values(), n)
    results = []
    for n, (rank, program, microbatch, reads, leaves, sums) in enumerate(order):
        of_reads = {name: (key, reader[key] == n) for name, key in reads.items()}
        of_leaves = {name: pair for name, pair in leaves.items() if pair[0] in reader}
        results.append(Dispatch(rank, program, microbatch, of_reads, of_leaves, sums))
    return results
