"""The efficiency of a step, measured on the pipeline's devices: `Pipeline.measure`.

The step is compiled once more, with the table entries to run as an argument. So one program can run
all actions of one rank, one kind of action of one stage, or nothing. The time of an action is its
run minus the run of nothing. Noise may hide such a difference: a figure that noise decides is NaN.
Letters: K stages.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.base.arguments import is_whole
from pipeline.core.options.plan import Plan
from pipeline.core.placement import meshes
from pipeline.core.step import runtime
from pipeline.core.step.operands import Operands
from pipeline.insight.calibrate.conclude import UNSURE, error_of_median, spread_of
from pipeline.insight.calibrate.measure import seconds
from pipeline.insight.calibrate.one_rank import Runs, entries, partial_step
from schedules import Costs, simulate
from schedules.core.timetable import kinds_in

OF_ACTIONS = 3  # measurements of each kind of action of each stage
SPREAD = 0.1  # the largest difference of bubbles by these measurements, as a part of the step
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
      bubble: the part of the step in which the busiest rank waits, by the clock.
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
        waits = f"of the step that rank waits, by its measured durations ({self.clock} clock)"
        alone = f"all actions of the busiest rank ({self.rank}), alone, in turn with the steps"
        rows = [
            (
                "step",
                _milliseconds(self.step),
                f"median of {len(self.steps)} steps, {_spread(self.steps)}",
            ),
            (
                "ideal",
                _milliseconds(self.ideal),
                f"{alone}, {_spread(self.works)}",
            ),
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
    partial, program = partial_step(plan, operands), plan.training
    none = np.zeros_like(program.op, bool)

    def step() -> Any:
        with meshes.entered(plan.mesh, plan.home):
            return runtime.train(plan, *operands)

    chunks = range(plan.num_chunks)
    ranks = range(plan.schedule.num_ranks)
    parts = {rank: entries(program, chunks, rank=rank) for rank in ranks}
    timed: list[Callable[[], Any]] = [step, functools.partial(partial, none)]
    timed += [functools.partial(partial, runs) for runs in parts.values()]
    busy, start = _busy_elsewhere(), time.perf_counter()
    whole, idle, *of_ranks = _in_turn(timed, steps)
    others = (_busy_elsewhere() - busy) / (time.perf_counter() - start)
    works = [[a - b for a, b in zip(times, idle, strict=True)] for times in of_ranks]
    rank = max(parts, key=lambda rank: statistics.median(works[rank]))
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
    each = [_costs(plan, partial, none) for _ in range(OF_ACTIONS)]
    costs = _take_medians(each)
    waits = [efficiency * _compute_wait(plan, one, rank) for one in (costs, *each)]
    bubble = waits[0]
    if not math.isnan(efficiency) and not max(waits) - min(waits) <= SPREAD:
        seen = ", ".join(map(_percent, waits[1:]))
        notes.append(
            f"by {OF_ACTIONS} measurements of the actions the bubble is {seen}: noise decides "
            f"bubble and rest; {REPEAT}"
        )
        bubble = math.nan
    elif bubble > 1 - efficiency + STEADY:
        notes.append(
            f"the actions of a rank and its waits would take {efficiency + bubble:.0%} of the "
            f"step: noise decides bubble and rest; {REPEAT}"
        )
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
        clock=simulate(plan.schedule, **{**plan.clock, "costs": costs}).clock,
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


def _compute_wait(plan: Plan, costs: Costs, rank: int) -> float:
    """Return the time that a rank waits over the time that it works; NaN if it has no work."""
    report = simulate(plan.schedule, **{**plan.clock, "costs": costs})
    work = report.work[rank]
    return report.makespan / work - 1 if work else math.nan


def _take_medians(each: Sequence[Costs]) -> Costs:
    durations: dict[str, Any] = {}
    for name in ("f", "i", "w", "b"):
        per_stage = [getattr(costs, name) for costs in each]
        if isinstance(per_stage[0], tuple):
            durations[name] = tuple(map(statistics.median, zip(*per_stage, strict=True)))
    return Costs(**durations)


def _in_turn(timed: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Time programs in turn, ``rounds`` times each; first run each program once to compile it."""
    for run in timed:
        seconds(run)
    times = [[seconds(run) for run in timed] for _ in range(rounds)]
    return [list(each) for each in zip(*times, strict=True)]


def _costs(plan: Plan, partial: Callable[[Any], Any], none: Runs) -> Costs:
    """Measure once [K] durations of each kind of action on a whole microbatch, in seconds."""
    schedule = plan.schedule
    kinds = sorted(kinds_in(schedule))
    keys, runs = [], [none]
    for k, rank in enumerate(schedule.placement):
        chunk = schedule.stages_of[rank].index(k)
        for kind in kinds:
            marked = entries(plan.training, [chunk], kind, rank=rank)
            if marked.any():
                keys.append((kind, k))
                runs.append(marked)
    (idle,), *times = _in_turn([functools.partial(partial, own) for own in runs], 1)
    found = {kind: [0.0] * schedule.num_stages for kind in "FBIW"}
    for (kind, k), (own,) in zip(keys, times, strict=True):
        found[kind][k] = max(own - idle, 0.0) / schedule.num_microbatches
    halves: dict[str, Any] = {"i": found["I"], "w": found["W"]} if "I" in kinds else {}
    whole: dict[str, Any] = {"b": found["B"]} if "B" in kinds else {}
    return Costs(f=found["F"], **halves, **whole)


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
