"""The efficiency of a step, measured on the pipeline's devices: `Pipeline.measure`.

With the engine "scan" the step is compiled once more, with the table entries to run as an argument.
So one program can run all actions of one rank, one kind of action of one stage, or nothing, and the
time of an action is its run minus the run of nothing. With the engine "programs" each action is a
program, and a step runs them one by one; so are the actions of both engines timed if all ranks
share embed or head. Noise may hide a time: a figure that noise decides is NaN.
Letters: S ranks, K stages.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from collectives.places.homes import processes_of
from pipeline.base.arguments import is_whole
from pipeline.core.options.plan import Plan
from pipeline.core.placement import meshes
from pipeline.core.step import runtime
from pipeline.core.step.calls.opened import StepInputs
from pipeline.core.step.operands import Operands
from pipeline.insight.calibrate.conclude import UNSURE, error_of_median, spread_of
from pipeline.insight.calibrate.measure import seconds
from pipeline.insight.calibrate.one_rank import Runs, entries, partial_step
from schedules import Costs, simulate
from schedules.core.action import KINDS
from schedules.core.timetable import kinds_in
from schedules.lowering.program import COMMON

OF_ACTIONS = 3  # measurements of each kind of action of each stage
SPREAD = 0.1  # the largest difference of bubbles by these measurements, as a part of the step
LEAST = 0.5  # the least sum of a rank's actions, as a part of their time together
STEADY = 0.1  # the largest interquartile range / median without a note
REPEAT = "take more steps=, larger microbatches, or a quiet machine"
OTHERS = 0.1  # the most cores that other programs may keep busy without a note


@dataclass(frozen=True)
class Efficiency:
    """Times of a training step, in seconds, divided into work, waiting and the rest.

    A figure is NaN, printed as "-", if noise decides it; then a note says why.

    Attributes:
      step: the median time of a step.
      ideal: the median work of the busiest rank.
      efficiency: ideal / step.
      bubble: the part of the step in which the busiest rank waits, by the clock; that of
        `Pipeline.describe` is a part of all ranks' time, without overhead.
      rest: the part of the step that is neither work nor waiting.
      steps: [n] the time of each step.
      works: [n] each measurement of the busiest rank's work.
      rank: the busiest rank.
      clock: the clock that predicts the bubble, "event" or "lockstep".
      costs: measured durations of actions, for `schedules.simulate`; 0 if noise hides one.
      notes: circumstances that make the numbers unreliable.
    """

    step: float
    ideal: float
    efficiency: float
    bubble: float
    rest: float
    steps: tuple[float, ...]
    works: tuple[float, ...]
    rank: int
    clock: str
    costs: Costs
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A table with a definition in each line."""
        waits = f"of the step that rank waits ({self.clock} clock); describe() counts all ranks"
        alone = f"all actions of the busiest rank ({self.rank}), alone, in turn with the steps"
        rows = [
            (
                "step",
                _milliseconds(self.step),
                f"median of {len(self.steps)} steps, {_spread(self.steps)}",
            ),
            ("ideal", _milliseconds(self.ideal), f"{alone}, {_spread(self.works)}"),
            ("efficiency", _percent(self.efficiency), "ideal / step"),
            ("bubble", _percent(self.bubble), waits),
            (
                "rest",
                _percent(self.rest),
                "of the step: exchanges, reductions, dispatch, and cores that ranks share",
            ),
        ]
        lines = [f"{name:<10}  {value:>9}  {text}" for name, value, text in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def measure(plan: Plan, operands: Operands, *, steps: int) -> Efficiency:
    """Time steps and, in turn with them, the actions of each rank alone.

    Nothing is written: no weights, no declared state, no counts of random streams.

    Raises:
      ValueError: ``steps`` is no integer >= 1, or the batch or the weights are traced.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        raise ValueError(
            "measure() runs steps on the devices and times them, and its batch or its weights are "
            "traced: call it outside of jax.jit and other transformations"
        )
    if not is_whole(steps, 1, numpy=True):
        raise ValueError(f"steps={steps!r}: must be an integer >= 1, how many steps are timed")
    # A table cannot leave out the work of all ranks, so their actions are timed as programs.
    by_program = plan.engine == "programs" or plan.shared
    timed = ProgramActions(plan, operands) if by_program else TableActions(plan, operands)

    def step() -> Any:
        return _run_step(plan, operands)

    seconds(step)  # the first runs compile
    timed.works()
    whole, of_ranks = list[float](), list[list[float]]()
    busy, start = _busy_elsewhere(), time.perf_counter()
    for _ in range(steps):
        whole.append(seconds(step))
        of_ranks.append(timed.works())
    others = (_busy_elsewhere() - busy) / (time.perf_counter() - start)
    works = list(zip(*of_ranks, strict=True))
    rank = max(range(plan.schedule.num_ranks), key=lambda rank: statistics.median(works[rank]))
    notes: list[str] = []
    taken = _settle_median("step", whole, notes)
    ideal = _settle_median("ideal", works[rank], notes)
    efficiency = ideal / taken
    if efficiency > 1:
        notes.append(
            f"the work of a rank took {_milliseconds(ideal)}, longer than the whole step: noise "
            f"decides efficiency, bubble and rest; {REPEAT}"
        )
        efficiency = math.nan
    each = [_costs(plan, timed) for _ in range(OF_ACTIONS)]
    costs = _take_medians(each)
    reports = [simulate(plan.schedule, **plan.clock_with(one)) for one in (costs, *each)]
    waits = [
        efficiency * (report.makespan / report.work[rank] - 1) if report.work[rank] else math.nan
        for report in reports
    ]
    bubble, sums = waits[0], list(zip(reports[0].work, map(statistics.median, works), strict=True))
    reason = _doubt_bubble(waits, sums, efficiency)
    if reason and not math.isnan(efficiency):
        notes.append(f"{reason}: noise decides bubble and rest; {REPEAT}")
        bubble = math.nan
    return Efficiency(
        step=taken,
        ideal=ideal,
        efficiency=efficiency,
        bubble=bubble,
        rest=1 - efficiency - bubble,
        steps=tuple(whole),
        works=tuple(works[rank]),
        rank=rank,
        clock=reports[0].clock,
        costs=costs,
        notes=(*notes, *_notes(plan, {"step": whole, "ideal": works[rank]}, others)),
    )


def _settle_median(name: str, times: Sequence[float], notes: list[str]) -> float:
    """Return the median of times; NaN, and a note, if its error is too large."""
    took = spread_of(times)
    if took.median > 0 and error_of_median(took, len(times)) <= UNSURE * took.median:
        return took.median
    notes.append(
        f"{len(times)} measurements of {name} have the median {_milliseconds(took.median)} and "
        f"differ from it by {_milliseconds(took.spread)}: noise decides it, and what is computed "
        f"from it; {REPEAT}"
    )
    return math.nan


def _doubt_bubble(
    waits: Sequence[float], sums: Sequence[tuple[float, float]], efficiency: float
) -> str:
    """Say why noise decides the bubble, or "". ``sums``: [S] seconds, kind by kind and together."""
    if not max(waits) - min(waits) <= SPREAD:
        seen = ", ".join(map(_percent, waits[1:]))
        return f"by {OF_ACTIONS} measurements of the actions the bubble is {seen}"
    for rank, (apart, together) in enumerate(sums):
        if apart <= max(0.0, LEAST * together):
            return (
                f"the actions of rank {rank} take {_milliseconds(apart)} kind by kind, and "
                f"{_milliseconds(together)} together"
            )
    busy = efficiency + waits[0]
    if busy > 1 + STEADY:
        return f"the actions of a rank and its waits would take {busy:.0%} of the step"
    return ""


def _take_medians(each: Sequence[Costs]) -> Costs:
    durations: dict[str, Any] = {
        end: statistics.median(getattr(costs, end) for costs in each) for end in ("head", "embed")
    }
    for name in ("f", "i", "w", "b"):
        per_stage = [getattr(costs, name) for costs in each]
        if isinstance(per_stage[0], tuple):
            durations[name] = tuple(map(statistics.median, zip(*per_stage, strict=True)))
    return Costs(**durations)


def _in_force(plan: Plan) -> AbstractContextManager[None]:
    """A context for programs, in which no mesh is in force."""
    mesh = None if plan.stage_meshes else plan.mesh
    return meshes.entered(mesh, plan.home, programs=True)


def _run_step(plan: Plan, operands: Operands) -> Any:
    if plan.engine == "programs":
        from pipeline.core.programs.runtime import train

        with _in_force(plan):
            return train(plan, *operands)
    with meshes.entered(plan.mesh, plan.home):
        return runtime.train(plan, *operands)


class TableActions:
    """Runs of parts of the table of a step of the engine "scan".

    Args:
      plan: the options of the pipeline.
      operands: the arguments of a training step.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self._plan = plan
        self._partial = partial_step(plan, operands)
        self._none = np.zeros_like(plan.training.op, bool)

    def works(self) -> list[float]:
        """Time once [S] all actions of each rank."""
        plan, chunks = self._plan, range(self._plan.num_chunks)
        ranks = range(plan.schedule.num_ranks)
        return self._seconds([entries(plan.training, chunks, rank=rank) for rank in ranks])

    def times(self) -> dict[tuple[str, int], float]:
        """Time the actions of a step, by kind and stage, the sum over microbatches."""
        schedule = self._plan.schedule
        parts: dict[tuple[str, int], Runs] = {}
        for k, rank in enumerate(schedule.placement):
            chunk = schedule.stages_of[rank].index(k)
            for kind in sorted(kinds_in(schedule)):
                marked = entries(self._plan.training, [chunk], kind, rank=rank)
                if marked.any():
                    parts[kind, k] = marked
        return dict(zip(parts, self._seconds(list(parts.values())), strict=True))

    def _seconds(self, parts: Sequence[Runs]) -> list[float]:
        """Time a run of each part, minus the run of nothing."""
        idle, *times = [
            seconds(functools.partial(self._partial, runs)) for runs in (self._none, *parts)
        ]
        return [taken - idle for taken in times]


class ProgramActions:
    """A step as programs, one program at a time.

    An action's time is the time from its call until its results are ready, minus the time of a
    program on the same devices that computes nothing. It has the call's overhead for its arguments,
    up to 0.1 ms. With several processes each measures its ranks. Work of all ranks counts on each
    of them.

    Args:
      plan: the options of the pipeline.
      operands: the arguments of a training step.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        from pipeline.core.programs.runtime import training_programs

        _, self._weights, self._batch = operands
        if plan.engine != "programs":
            plan = plan.anew(engine="programs", pattern=None, delayed=False)
        self._plan = plan
        with _in_force(self._plan):
            self._programs = training_programs(plan, *operands).compile()
        self._is_shared = len(processes_of(plan.devices)) > 1
        local = self._programs.meshes.local_ranks[0]
        self._nothing = {
            is_joint: functools.partial(jax.jit(jnp.negative), *numbers)
            for is_joint, numbers in (
                (False, self._programs.meshes.replicate(local, [np.int32(0)])),
                (True, self._programs.meshes.replicate(None, [np.int32(0)] * bool(plan.shared))),
            )
            if numbers
        }

    def works(self) -> list[float]:
        """Time once [S] all actions of each rank."""
        placement = self._plan.schedule.placement
        works = np.zeros(self._plan.schedule.num_ranks)
        for (kind, k), taken in self.times().items():
            works[slice(None) if kind in COMMON else placement[k]] += taken
        return list(works.tolist())

    def times(self) -> dict[tuple[str, int], float]:
        """Time the actions of a step, by kind and stage, the sum over microbatches.

        Work of all ranks is named as in `schedules.clocks.shared.Together`.
        """
        with _in_force(self._plan):
            return self._times()

    def _times(self) -> dict[tuple[str, int], float]:
        idle = {
            is_joint: statistics.median(seconds(nothing) for _ in range(9))
            for is_joint, nothing in self._nothing.items()
        }
        stages, kinds = range(self._plan.schedule.num_stages), (*KINDS, *COMMON)
        times: dict[tuple[str, int], float] = {(kind, k): 0.0 for kind in kinds for k in stages}

        def timed(name: tuple[str, int, int], run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                jax.block_until_ready(arguments)
                start = time.perf_counter()
                results = jax.block_until_ready(run(*arguments))
                times[name[:2]] += time.perf_counter() - start - idle[name[0] in COMMON]
                return results

            return call if name[0] in kinds else run

        programs = copy.copy(self._programs)
        programs.compiled = {name: timed(name, run) for name, run in programs.compiled.items()}
        jax.block_until_ready(programs(self._weights, self._batch, StepInputs()))
        if self._is_shared:  # a rank's process has measured its actions, other processes have zeros
            values = np.asarray(list(times.values()), np.float32)
            largest = np.asarray(multihost_utils.process_allgather(values)).max(axis=0)
            times = dict(zip(times, largest.tolist(), strict=True))
        return times


def _costs(plan: Plan, timed: TableActions | ProgramActions) -> Costs:
    """Measure once [K] durations of each kind of action, and of shared work, on a microbatch."""
    schedule, times = plan.schedule, timed.times()
    M, S, stages = schedule.num_microbatches, schedule.num_ranks, range(schedule.num_stages)

    def mean(kind: str) -> list[float]:
        return [max(times.get((kind, k), 0.0), 0.0) / M for k in stages]

    durations: dict[str, Any] = {kind.lower(): mean(kind) for kind in kinds_in(schedule)}
    lookup, head, scatter = (S * sum(mean(part)) for part in COMMON)
    return Costs(**durations, head=head, embed=(lookup + scatter) / 2)


def _busy_elsewhere() -> float:
    """Return the seconds that cores have worked for other processes; 0 without ``/proc/stat``."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    except (OSError, ValueError):
        return 0.0
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _notes(plan: Plan, timed: Mapping[str, Sequence[float]], others: float) -> list[str]:
    """List the circumstances that make the numbers unreliable.

    Args:
      others: cores that other programs kept busy meanwhile.
    """
    notes = []
    if others > OTHERS:
        notes.append(f"other programs kept {others:.1f} cores busy: repeat it on a quiet machine")
    for name, times in timed.items():
        low, middle, high = _quartiles(times)
        if high - low > STEADY * middle:
            notes.append(
                f"the middle half of the times of {name} spans {_milliseconds(high - low)} around "
                f"{_milliseconds(middle)}: take more steps=, or longer ones"
            )
    devices, cores = plan.mesh.devices.flat, os.cpu_count() or 1
    if devices[0].platform == "cpu" and plan.mesh.size > cores:
        notes.append(
            f"{plan.mesh.size} virtual devices share {cores} cores: ranks wait for a core, which "
            f"counts as rest"
        )
    return notes


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _spread(times: Sequence[float]) -> str:
    low, _, high = _quartiles(times)
    return f"half of them {_milliseconds(low)} to {_milliseconds(high)}"


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:.1%}"


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.3g} ms"
