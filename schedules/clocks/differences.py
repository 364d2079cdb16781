"""Differences between the time of a run and its prediction, and their causes.

A step lasts until its last rank has ended, so S ranks have S makespans of time together. A rank
works; or it waits while another rank works, for a message or for the other rank to reach an
exchange; or no rank works at all. In the last case the step is in exchanges, in the loop over
ticks, or in dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schedules.clocks.report import Report, slot_options
from schedules.clocks.simulate import simulate
from schedules.core.action import KINDS, ScheduleError, shorten
from schedules.core.arguments import need
from schedules.core.flat import Flat, flatten
from schedules.core.timetable import actions_of

MOST = 8  # the number of differences that are printed


class Difference(NamedTuple):
    """One cause of a difference between measured and predicted time.

    Attributes:
      measured: the measured time, summed over ranks, in the unit of the report.
      predicted: the predicted time, summed over ranks, in the unit of the report.
      cause: the cause in words.
    """

    measured: float
    predicted: float
    cause: str

    @property
    def more(self) -> float:
        """The measured time beyond the prediction."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Differences:
    """Differences between two reports of a schedule.

    Attributes:
      measured: the report of a run.
      predicted: the report of a clock.
      found: every cause, the largest difference first; the differences sum to S times the
        difference of the makespans.
      slow: (excess time, cause) of actions that took longer than other actions of their kind and
        stage, the largest first; ``found`` includes these times.
    """

    measured: Report
    predicted: Report
    found: tuple[Difference, ...]
    slow: tuple[tuple[float, str], ...]

    def __str__(self) -> str:
        """Write a line for the makespans, and a line for each of the largest differences."""
        took, said = self.measured.makespan, self.predicted.makespan
        whole = said * self.measured.schedule.num_ranks or 1.0
        against = f" ({took / said - 1:+.1%})" if said else ""
        lines = [f"makespan {took:.4g}, predicted {said:.4g}{against}; of all ranks' time:"]
        lines += [
            f"{row.more / whole:+7.1%}  {row.cause}: {row.measured:.4g}, predicted "
            f"{row.predicted:.4g}"
            for row in self.found[:MOST]
            if abs(row.more) >= whole / 2000
        ]
        lines += [f"{more / whole:+7.1%}  of which {cause}" for more, cause in self.slow]
        return "\n".join(lines)


def differences(measured: Report, predicted: Report | None = None) -> Differences:
    """Compare a run with its prediction.

    Args:
      measured: a report of `pipeline.Pipeline.trace`, or any other report.
      predicted: a report of the same schedule, in the same unit. By default it is simulated by the
        clock of the run with the costs of ``measured``: lockstep with its slots, or the event clock
        for a run without slots (``engine="programs"``). Actions then have their measured durations,
        so that all differences are between actions.

    Raises:
      ScheduleError: an argument that is not a report, or reports of different schedules.
    """
    need("measured", measured, Report, "give what pipe.trace() or simulate() returned")
    if predicted is None:
        options: dict[str, Any] = {"shared": measured.shared}
        if measured.pattern is not None:
            options |= {"clock": "lockstep", **slot_options(measured)}
        predicted = simulate(measured.schedule, measured.costs, **options)
    need("predicted", predicted, Report, "give what simulate() returned, or leave it out")
    if measured.schedule != predicted.schedule:
        raise ScheduleError(
            f"predicted is of {shorten(predicted.schedule.name)}, and measured of "
            f"{shorten(measured.schedule.name)}: their actions differ; give reports of one schedule"
        )
    if measured.shared != predicted.shared:
        raise ScheduleError(
            f"predicted has shared={predicted.shared}, and measured {measured.shared}: work that "
            f"all ranks do together is in one of them only; give both reports the same shared="
        )
    flat = flatten(measured.schedule)
    actual, expected = _parts(measured, flat), _parts(predicted, flat)
    rows = [Difference(actual[cause], expected[cause], cause) for cause in actual]
    rows.sort(key=lambda difference: -abs(difference.more))
    return Differences(measured, predicted, tuple(rows), tuple(_slow(measured, flat)))


def _parts(report: Report, flat: Flat) -> dict[str, float]:
    """Sum the time of all ranks by cause: actions by stage, shared work, waits."""
    schedule, times = report.schedule, {}
    starts, ends = (np.concatenate(rows) for rows in (report.starts, report.ends))
    for stage in range(schedule.num_stages):
        for n, kind in enumerate(KINDS):
            mine = (flat.kind == n) & (flat.stage == stage)
            if mine.any():
                total = float((ends - starts)[mine].sum())
                times[f"{int(mine.sum())} times {kind} of stage {stage}"] = total
    ranks, together = schedule.num_ranks, sum(end - start for start, end in report.common)
    if report.shared:
        times["what all ranks do together"] = ranks * together
    spans = [*zip(starts.tolist(), ends.tolist(), strict=True), *report.common]
    nobody = report.makespan - _covered(spans)
    for rank, (begun, ended) in enumerate(zip(report.starts, report.ends, strict=True)):
        works = sum(ended) - sum(begun) + together
        times[f"rank {rank} waits while others work"] = report.makespan - works - nobody
    times["no rank works: exchanges, the loop over ticks, dispatch"] = ranks * nobody
    return times


def _covered(spans: list[tuple[float, float]]) -> float:
    """Sum the time that intervals cover; overlaps count once."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _slow(report: Report, flat: Flat) -> list[tuple[float, str]]:
    """Find up to three actions that took more than 1.5 times the median of their kind and stage."""
    actions = actions_of(report.schedule)
    starts, ends = (np.concatenate(rows) for rows in (report.starts, report.ends))
    lasting, slow = ends - starts, []
    for kind, stage in sorted(set(zip(flat.kind.tolist(), flat.stage.tolist(), strict=True))):
        mine = np.flatnonzero((flat.kind == kind) & (flat.stage == stage))
        middle = float(np.median(lasting[mine]))
        for n in mine[lasting[mine] > 1.5 * middle].tolist():
            cause = f"{actions[n]} took {lasting[n]:.4g}, others of its kind {middle:.4g}"
            slow.append((float(lasting[n]) - middle, cause))
    return sorted(slow, reverse=True)[:3]
