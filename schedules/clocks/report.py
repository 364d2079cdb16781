"""The report of a clock: times of all actions, their sums, and the causes of waiting.

Every moment of idle time has a cause. A rank waits for a message because the sending action has not
ended (*fill*, *drain* or *imbalance*, by phase), or because the message is being sent
(*communication*). It may also wait because the exchange waits for other ranks (*lockstep*): for
their work or, with delayed sends, for the slot in which the message is sent. A rank that has ended
waits for the last rank: the *optimizer wait* of a synchronous step.

Shared work counts as work, not as waiting. Before shared work a rank waits for the input of its
next action, with the causes above. If the input has arrived, the rank waits for the other ranks:
*lockstep* under any clock.

The phase is *fill* until the rank's first backward action begins, *drain* after its last F, and
*imbalance* between.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from schedules.clocks.shared import Shared
from schedules.core.action import Action, printable
from schedules.core.costs import Costs, Times
from schedules.core.events import message_times
from schedules.core.flat import (
    F,
    Flat,
    Ints,
    W,
    crossings_held,
    flatten,
    inputs_held,
    microbatches_held,
)
from schedules.core.messages import senders
from schedules.core.schedule import Schedule
from schedules.core.timetable import actions_of

Cause = Literal["fill", "drain", "imbalance", "communication", "lockstep", "optimizer wait"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_DRAIN, _COMMUNICATION, _LOCKSTEP, _OPTIMIZER = 1, 3, 4, 5


class Wait(NamedTuple):
    """An interval in which a rank idles for one cause.

    Attributes:
      start: the start of the interval, in the unit of the costs.
      end: the end of the interval.
      cause: one of `CAUSES`.
      position: the index of the waiting action in the rank's order; None after the last action.
      behind: the action that sends the awaited message; None if no message is awaited.
    """

    start: float
    end: float
    cause: Cause
    position: int | None
    behind: Action | None


@dataclass(frozen=True, eq=False)
class Explanation:
    """The idle time of a step, from 0 to the makespan.

    Attributes:
      report: the explained report.
      waits: [S] tuples of Wait, in order of time, each with a positive duration.
    """

    report: Report
    waits: tuple[tuple[Wait, ...], ...]

    @functools.cached_property
    def parts(self) -> tuple[dict[Cause, float], ...]:
        """[S] dicts of a rank's idle time by cause."""
        result: list[dict[Cause, float]] = []
        for row in self.waits:
            part: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
            for start, end, cause, *_ in row:
                part[cause] += end - start
            result.append(part)
        return tuple(result)

    @functools.cached_property
    def total(self) -> tuple[float, ...]:
        """[S] the idle time of each rank, makespan - work: the sum of the causes."""
        return tuple(sum(part.values()) for part in self.parts)

    def __str__(self) -> str:
        """Format a table of shares of the makespan, with ranks as rows and causes as columns."""
        whole = self.report.makespan or 1.0
        used = [cause for cause in CAUSES if any(part[cause] for part in self.parts)]
        heads = ["work", *used, "idle"]
        widths = [max(8, len(head) + 2) for head in heads]
        lines = [" " * 8 + "".join(map(str.rjust, heads, widths))]
        rows = zip(self.report.work, self.parts, self.total, strict=True)
        for rank, (work, part, total) in enumerate(rows):
            cells = [work, *(part[cause] for cause in used), total]
            shares = [f"{cell / whole:.1%}" for cell in cells]
            lines.append(f"rank {rank:<3}" + "".join(map(str.rjust, shares, widths)))
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Times of all actions, in the unit of the costs; time 0 is the start of the first action.

    Attributes:
      schedule: the timed schedule.
      costs: the durations.
      clock: "event", "lockstep" or "measured".
      pattern: the slots of a lockstep tick, an option of `lower`, also of a measured run; None
        without slots.
      partners: whether a lockstep exchange synchronizes only its sender and receiver, not all
        ranks.
      delayed: whether a lockstep exchange runs during the work of the next slot.
      shared: the ends of the model that all ranks share.
      makespan: the end of the last action and of shared work.
      span: [S] the time from the start of a rank's first action to the end of its last; the whole
        step if ranks share work.
      work: [S] the sum of a rank's durations, and its part of the shared work.
      idle: [S] the waiting inside the span, span - work.
      bubble_rate: idle / span of the rank with the longest span. Ranks that start or end at
        different times wait outside their spans, so a step with a synchronous optimiser may wait
        even if this is 0. `step_bubble_rate` counts that waiting too.
      peak_activations: [S] the most stage inputs held at once. An input is held from the start of
        its F to the end of its B or I. From then to the end of W, the values that I keeps for W
        count as one input. With N slices a slice counts as 1/N.
      peak_crossings: [S] the most values that I keeps for W, held at once.
      starts: [S] tuples, aligned with ``schedule.orders``. The halves of a pair that overlaps
        (`Costs.pair`) share the pair's time in proportion to their own durations.
      ends: [S] tuples, aligned with ``schedule.orders``.
      common: start and end of shared work, in order of time.
      moved: [S] tuples, aligned with ``schedule.orders``: whether the action writes to host memory
        or waits for a stash from host memory; empty without offload.
      unit: "s" if the times are seconds of a run; "" for the unit of the costs.
    """

    schedule: Schedule
    costs: Costs
    clock: str
    pattern: str | None
    partners: bool
    delayed: bool
    shared: Shared
    makespan: float
    span: tuple[float, ...]
    work: tuple[float, ...]
    idle: tuple[float, ...]
    bubble_rate: float
    peak_activations: tuple[float, ...]
    peak_crossings: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)
    common: tuple[tuple[float, float], ...] = field(repr=False)
    moved: tuple[tuple[bool, ...], ...] = field(default=(), repr=False)
    unit: str = ""

    def __str__(self) -> str:
        """Write a line for the step, and a line for each rank."""
        step = (
            f"{printable(self.schedule.name)}: {sizes(self.schedule)}; clock {self.clock}, "
            f"makespan {self.makespan:.6g}, bubble {self.step_bubble_rate:.1%} of the step"
        )
        ranks = (
            f"rank {rank}: works {work:.6g}, waits {self.makespan - work:.6g}, holds at most "
            f"{peak:.6g} activations"
            for rank, (work, peak) in enumerate(zip(self.work, self.peak_activations, strict=True))
        )
        return "\n".join([step, *ranks])

    @property
    def step_time(self) -> float:
        """The time of the makespan plus the synchronous optimiser step."""
        return self.makespan + self.costs.optimizer

    @property
    def step_bubble_rate(self) -> float:
        """The idle share of all ranks' time, from 0 to the makespan."""
        whole = self.makespan * len(self.work)
        return max(0.0, 1.0 - sum(self.work) / whole) if whole else 0.0

    @property
    def efficiency(self) -> float:
        """1 - step_bubble_rate."""
        return 1.0 - self.step_bubble_rate

    @functools.cached_property
    def ideal(self) -> float:
        """The makespan with no waiting, equal work on all ranks, and the cheapest backwards.

        A backward takes B or, if the schedule has halves and they take less, I + W. If halves take
        longer than B, their additional time is work, but the ideal excludes it. For a measured
        clock only the durations of the actions that ran are known.
        """
        schedule, ranks = self.schedule, len(self.work)
        if self.clock == "measured":
            return sum(self.work) / ranks
        f, b, i, w = self.costs.table(schedule.num_stages, self.shared)
        if (flatten(schedule).kind == W).any():
            b = np.minimum(b, i + w)
        each = f if schedule.is_forward else f + b
        stages = schedule.num_microbatches * float(each.sum()) / ranks
        return stages + (_common(schedule, self.costs, self.shared) if self.shared else 0.0)

    @property
    def against_ideal(self) -> float:
        """The ideal over the makespan: efficiency that excludes the additional work of halves."""
        return self.ideal / self.makespan if self.makespan else 1.0

    def explain(self) -> Explanation:
        """Split every rank's waiting from 0 to the makespan by cause."""
        return explain(self)


def sum_up(
    schedule: Schedule,
    costs: Costs,
    clock: str,
    slots: Mapping[str, Any],
    flat: Flat,
    starts: Times,
    lasting: Times,
    common: Times,
) -> Report:
    """Make a report from [A] starts and durations, and [n, 2] start and end of shared work.

    ``slots`` has the fields of `Report` on lockstep and on moved values.
    """
    ends = starts + lasting
    begun, ended = ([part.tolist() for part in flat.by_rank(x)] for x in (starts, ends))
    span = [last[-1] - first[0] for first, last in zip(begun, ended, strict=True)]
    work = [float(part.sum()) for part in flat.by_rank(lasting)]
    makespan = float(max(ends.max(), common.max(initial=0.0)))
    if slots["shared"]:
        span = [makespan] * len(span)
        work = [part + _common(schedule, costs, slots["shared"]) for part in work]
    idle = [max(0.0, whole - part) for whole, part in zip(span, work, strict=True)]
    longest = max(range(len(span)), key=span.__getitem__)
    return Report(
        schedule=schedule,
        costs=costs,
        clock=clock,
        **slots,
        makespan=makespan,
        span=tuple(span),
        work=tuple(work),
        idle=tuple(idle),
        bubble_rate=idle[longest] / span[longest] if span[longest] else 0.0,
        peak_activations=_peaks(schedule, inputs_held),
        peak_crossings=_peaks(schedule, crossings_held),
        starts=tuple(map(tuple, begun)),
        ends=tuple(map(tuple, ended)),
        common=tuple(map(tuple, common.tolist())),
    )


def slot_options(report: Report) -> dict[str, Any]:
    """Return the options of `simulate` and `lower` that give the slots of a report."""
    return {"pattern": report.pattern, "partners": report.partners, "delayed": report.delayed}


def sizes(schedule: Schedule) -> str:
    """Write sizes as text: ``4 ranks, 8 stages, 16 microbatches``, and ``of 4 slices``."""
    cut = f" of {schedule.num_slices} slices" if schedule.num_slices > 1 else ""
    return (
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches{cut}"
    )


def _peaks(schedule: Schedule, units_held: Callable[[Ints], Ints]) -> tuple[float, ...]:
    return tuple(counts.max().item() for counts in microbatches_held(schedule, units_held))


def _common(schedule: Schedule, costs: Costs, shared: Shared) -> float:
    """Return a rank's part of the shared work of a step."""
    times = 1 if schedule.is_forward else 2  # an embedding and its gradient
    each = costs.head * ("head" in shared) + times * costs.embed * ("embed" in shared)
    return schedule.num_microbatches * each / schedule.num_ranks


def explain(report: Report) -> Explanation:
    """Find the cause of every wait in a report."""
    schedule = report.schedule
    flat = flatten(schedule)
    starts = np.concatenate([np.array(row) for row in report.starts])
    ends = np.concatenate([np.array(row) for row in report.ends])
    free = np.zeros_like(ends)
    free[1:] = ends[:-1]
    free[flat.first[:-1]] = 0.0
    sender, ready, arrival = _messages(report, flat, ends)
    # free <= sent <= there <= start: waiting for the sender, for the transfer, for the exchange.
    sent = np.minimum(np.maximum(ready, free), starts)
    there = np.minimum(np.maximum(arrival, sent), starts)
    phase = _phases(flat)
    waits: list[tuple[Wait, ...]] = []
    bounds = (free, sent, there, starts)
    causes = (phase, np.full_like(phase, _COMMUNICATION), np.full_like(phase, _LOCKSTEP))
    actions = actions_of(schedule)
    for rank, (first, stop) in enumerate(zip(flat.first[:-1], flat.first[1:], strict=True)):
        row: list[Wait] = []
        for n in (first + np.flatnonzero(starts[first:stop] > free[first:stop])).tolist():
            behind = actions[sender[n]] if sender[n] >= 0 else None
            for part, cause in enumerate(causes):
                begin, end = float(bounds[part][n]), float(bounds[part + 1][n])
                row += _around(report, Wait(begin, end, CAUSES[cause[n]], int(n - first), behind))
        done = max(ended := report.ends[rank][-1], report.common[-1][1] if report.common else 0.0)
        row += _around(report, Wait(ended, done, CAUSES[_DRAIN], None, None))
        row += _around(report, Wait(done, report.makespan, CAUSES[_OPTIMIZER], None, None))
        waits.append(tuple(row))
    return Explanation(report, tuple(waits))


def _around(report: Report, wait: Wait) -> Iterator[Wait]:
    """Split a wait at the work that all ranks share; yield the intervals between."""
    start, common = wait.start, report.common
    for n in range(bisect.bisect_right(common, start, key=lambda span: span[1]), len(common)):
        begin, end = common[n]
        if begin >= wait.end:
            break
        if begin > start:
            yield wait._replace(start=start, end=begin)
        start = end
    if wait.end > start:
        yield wait._replace(start=start)


def _messages(report: Report, flat: Flat, ends: Times) -> tuple[Ints, Times, Times]:
    """Return three [A] columns: the sender that an action waits for or -1, its end, the arrival."""
    schedule = report.schedule
    left = ends.copy()  # the time when each message is sent
    overlap = report.clock == "event" and report.costs.pair is not None
    first = np.flatnonzero(flat.pair & overlap)
    left[first] = ends[first + 1]
    sender = senders(schedule).copy()
    lag = message_times(schedule, report.costs)
    ready = np.where(sender >= 0, left[sender], 0.0)
    arrival = np.where(sender >= 0, left[sender] + lag[sender], 0.0)
    later = first[arrival[first + 1] > arrival[first]]  # a pair starts when it has both messages
    for column in (sender, ready, arrival):
        column[later] = column[later + 1]
    return sender, ready, arrival


def _phases(flat: Flat) -> Ints:
    """Return [A] the position in `CAUSES` of the phase in which each action waits."""
    phase = np.full(len(flat.kind), CAUSES.index("imbalance"))
    for first, stop in zip(flat.first[:-1], flat.first[1:], strict=True):
        kinds = flat.kind[first:stop]
        is_forward = np.flatnonzero(kinds == F)
        others = np.flatnonzero(kinds != F)
        phase[first + is_forward[-1] + 1 : stop] = CAUSES.index("drain")
        begun = others[0] + 1 if len(others) else len(kinds)
        phase[first : first + begun] = CAUSES.index("fill")
    return phase
