"""Why ranks wait: every moment of idle time of a step, and its cause.

A rank that waits for a message is idle because the action that sends it has not ended
(*fill*, *drain* or *imbalance*, by phase), because the message is under way (*communication*), or
because the exchange that brings it is not over for others (*lockstep*): for their work or, where
sends are delayed, for the slot in which it travels. Whoever has ended waits
for the last rank: the *optimizer wait* of a synchronous step.

What ranks share is work and no waiting. Before it a rank waits for what its next action needs, as
if nothing were shared; or, if that is there, for the others to come: *lockstep* under any clock.

The phase is *fill* until the rank's first backward action begins, *drain* after its last F, and
*imbalance* between. Letters as in `schedules.ir`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from schedules.core.costs import Times
from schedules.core.events import links
from schedules.core.flat import F, Flat, Ints, flatten
from schedules.ir import Action

if TYPE_CHECKING:
    from schedules.report import Report

Cause = Literal["fill", "drain", "imbalance", "communication", "lockstep", "optimizer wait"]
CAUSES: tuple[Cause, ...] = (
    "fill",
    "drain",
    "imbalance",
    "communication",
    "lockstep",
    "optimizer wait",
)
_DRAIN, _COMMUNICATION, _LOCKSTEP, _OPTIMIZER = 1, 3, 4, 5


class Wait(NamedTuple):
    """An interval in which a rank idles for one cause.

    Attributes:
      start: when it begins, in the unit of the costs.
      end: when it ends.
      cause: one of `CAUSES`.
      position: index in the rank's order of the action that waits; None after the last one.
      behind: the action whose message it waits for; None if there is none.
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
      report: what is explained.
      waits: [S] tuples of Wait, in order of time, none empty.
    """

    report: Report
    waits: tuple[tuple[Wait, ...], ...]

    @functools.cached_property
    def parts(self) -> tuple[dict[Cause, float], ...]:
        """[S] idle time by cause."""
        result: list[dict[Cause, float]] = []
        for row in self.waits:
            part: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
            for start, end, cause, *_ in row:
                part[cause] += end - start
            result.append(part)
        return tuple(result)

    @functools.cached_property
    def total(self) -> tuple[float, ...]:
        """[S] idle time, makespan - work: what the causes sum to."""
        return tuple(sum(part.values()) for part in self.parts)

    def __str__(self) -> str:
        """A table, ranks as rows, causes as columns, in shares of the makespan."""
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
    # free <= sent <= there <= start: waiting for another's work, for the wire, for the exchange.
    sent = np.minimum(np.maximum(ready, free), starts)
    there = np.minimum(np.maximum(arrival, sent), starts)
    phase = _phases(flat)
    waits: list[tuple[Wait, ...]] = []
    bounds = (free, sent, there, starts)
    causes = (phase, np.full_like(phase, _COMMUNICATION), np.full_like(phase, _LOCKSTEP))
    actions = [action for order in schedule.orders for action in order]
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
    """What of a wait lies outside of what ranks share."""
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
    """[A] index of the action that each waits for (or -1), its end, its message's arrival."""
    schedule = report.schedule
    wires = links(schedule, flat)
    sends = np.flatnonzero(wires.sent >= 0)
    left = ends.copy()  # when each message leaves
    overlap = report.clock == "event" and report.costs.pair is not None
    first = np.flatnonzero(flat.pair & overlap)
    left[first] = ends[first + 1]
    sender_of = np.full(2 * schedule.num_stages * schedule.num_microbatches + 1, -1)
    sender_of[wires.sent[sends]] = sends
    sender = sender_of[wires.awaited]  # -1 picks the last, which stays -1
    lag = report.costs.lags(flat.rank, wires.target, schedule.num_ranks)
    ready = np.where(sender >= 0, left[sender], 0.0)
    arrival = np.where(sender >= 0, left[sender] + lag[sender], 0.0)
    later = first[arrival[first + 1] > arrival[first]]  # a pair starts when it has both
    for column in (sender, ready, arrival):
        column[later] = column[later + 1]
    return sender, ready, arrival


def _phases(flat: Flat) -> Ints:
    """[A] the position in `CAUSES` of the phase in which each action waits."""
    phase = np.full(len(flat.kind), CAUSES.index("imbalance"))
    for first, stop in zip(flat.first[:-1], flat.first[1:], strict=True):
        kinds = flat.kind[first:stop]
        is_forward = np.flatnonzero(kinds == F)
        others = np.flatnonzero(kinds != F)
        phase[first + is_forward[-1] + 1 : stop] = CAUSES.index("drain")
        begun = others[0] + 1 if len(others) else len(kinds)
        phase[first : first + begun] = CAUSES.index("fill")
    return phase
