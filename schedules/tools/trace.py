"""A timeline for trace viewers: Chrome's JSON, which Perfetto and chrome://tracing open.

Each report is a process, each rank a thread. Its events are the actions and, between them, the
waits with their causes. Arrows are messages, and a counter is the number of stage inputs that the
rank holds. The format is "Trace Event Format" by the Chromium authors.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from schedules.clocks.report import Explanation, Report
from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import is_one_of
from schedules.core.files import open_replacement
from schedules.core.flat import F, flatten, inputs_held, takes_and_frees
from schedules.core.messages import links, senders
from schedules.tools.palette import CAUSES, NAMES, TOGETHER, heading, joined, several

Event = dict[str, Any]

# A trace counts in microseconds. All times are first rounded to nanoseconds, so that both
# sides of a boundary round alike and neighbours touch but never overlap.
NANOSECONDS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
MOST_NANOSECONDS = 2**53  # above this, a viewer's doubles are less precise than a nanosecond


def save_trace(
    reports: Report | Sequence[Report], path: str | os.PathLike[str], unit: str = "us"
) -> None:
    """Write one or several reports as a Chrome trace.

    Args:
      reports: reports of `simulate`.
      path: the file; viewers expect ``.json``.
      unit: the unit of the costs: "s", "ms", "us" or "ns". Times are written to the nanosecond.

    Raises:
      ScheduleError: there is nothing to write, or the unit is unknown or too large for the
        makespan.
    """
    reports = several(reports)
    if not is_one_of(unit, NANOSECONDS):
        raise ScheduleError(
            f"unit={shorten(unit)} is not a unit of time; choose one of "
            f"{', '.join(map(repr, NANOSECONDS))}"
        )
    scale = NANOSECONDS[unit]
    longest = max(report.makespan for report in reports)
    if longest * scale > MOST_NANOSECONDS:
        raise ScheduleError(
            f"unit={unit!r} makes the makespan of {longest:.6g} longer than 2**53 ns (104 days), "
            f"beyond which viewers round; choose a smaller unit"
        )
    flows = itertools.count(1)  # viewers match the ends of arrows by number, across processes
    with open_replacement(path) as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[')
        separator = "\n"
        for process, report in enumerate(reports, start=1):
            for event in _events(_Slices(report, process, scale, flows)):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _events(slices: _Slices) -> Iterator[Event]:
    report, process = slices.report, slices.process
    yield from _names(report, process)
    explanation = report.explain()
    for rank in range(report.schedule.num_ranks):
        yield from slices.actions(rank)
        yield from slices.waits(explanation, rank)
        for start, end in report.common:
            yield slices.slice(rank, TOGETHER, "shared", start, end)
    yield from slices.messages()
    for rank in range(report.schedule.num_ranks):
        for time, count in held(report, rank):
            yield {
                "ph": "C",
                "name": f"activations on rank {rank}",
                "pid": process,
                "ts": slices.at(time) / 1000,
                "args": {"held": count},
            }


def held(report: Report, rank: int) -> Iterator[tuple[float, int]]:
    """Yield (time, stage inputs held from then on) for each change on a rank, in order of time."""
    flat = flatten(report.schedule)
    kinds = flat.kind[flat.first[rank] : flat.first[rank + 1]]
    times = zip(report.starts[rank], report.ends[rank], strict=True)
    columns = zip(times, *takes_and_frees(kinds), inputs_held(kinds).tolist(), strict=True)
    for (start, end), takes, frees, count in columns:
        if takes:
            yield start, count
        if frees:
            yield end, count - 1


def _names(report: Report, process: int) -> Iterator[Event]:
    def name(what: str, key: str, value: str | int, thread: int = 0) -> Event:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {key: value}}

    yield name("process_name", "name", heading(report))
    yield name("process_sort_index", "sort_index", process)
    for rank in range(report.schedule.num_ranks):
        yield name("thread_name", "name", f"rank {rank}", rank + 1)
        yield name("thread_sort_index", "sort_index", rank, rank + 1)


class _Slices:
    """A converter of a report's times to events of one process."""

    def __init__(self, report: Report, process: int, scale: float, flows: Iterator[int]) -> None:
        self.report, self.process, self.scale, self.flows = report, process, scale, flows
        # F writes a stash. If crossings move instead, no F moves a value, and I writes W's values.
        rows = zip(report.schedule.orders, report.moved, strict=False)
        moved = (a.kind for row in rows for a, moves in zip(*row, strict=True) if moves)
        self.writer = "F" if "F" in moved else "I"

    def at(self, time: float) -> int:
        """Convert a time to nanoseconds."""
        return round(time * self.scale)

    def slice(self, rank: int, name: str, category: str, start: float, end: float) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self.process,
            "tid": rank + 1,
            "ts": self.at(start) / 1000,
            "dur": (self.at(end) - self.at(start)) / 1000,
        }

    def actions(self, rank: int) -> Iterator[Event]:
        schedule = self.report.schedule
        order, starts, ends = (
            schedule.orders[rank],
            self.report.starts[rank],
            self.report.ends[rank],
        )
        partner = {
            p + half: order[p + 1 - half] for p in joined(self.report, rank) for half in (0, 1)
        }
        for position, action in enumerate(order):
            event = self.slice(
                rank, str(action), NAMES[action.kind], starts[position], ends[position]
            )
            event["args"] = {
                "stage": action.stage,
                "kind": action.kind,
                "microbatch": action.microbatch,
                "chunk": schedule.chunk_of[action.stage],
            }
            if action.slice is not None:
                event["args"]["slice"] = action.slice
            if self.report.moved and self.report.moved[rank][position]:
                event["args"]["host memory"] = "writes" if action.kind == self.writer else "reads"
            if position in partner:
                event["args"]["overlaps with"] = str(partner[position])
            yield event

    def waits(self, explanation: Explanation, rank: int) -> Iterator[Event]:
        order = self.report.schedule.orders[rank]
        for wait in explanation.waits[rank]:
            event = self.slice(rank, f"idle: {wait.cause}", "idle", wait.start, wait.end)
            event["args"] = {"cause": wait.cause, "because": CAUSES[wait.cause]}
            if wait.position is not None:
                event["args"]["before"] = str(order[wait.position])
            if wait.behind is not None:
                event["args"]["waits for"] = str(wait.behind)
            yield event

    def messages(self) -> Iterator[Event]:
        """Draw an arrow from the end of the sending action to the start of the receiving action."""
        schedule, flat = self.report.schedule, flatten(self.report.schedule)
        starts, ends = (
            list(itertools.chain.from_iterable(row))
            for row in (self.report.starts, self.report.ends)
        )
        crosses, ranks, sender = links(schedule).crosses, flat.rank.tolist(), senders(schedule)
        for reader in np.flatnonzero((sender >= 0) & crosses[sender]).tolist():
            index = int(sender[reader])
            rank, there = ranks[index], ranks[reader]
            begin, end = self.at(starts[index]), self.at(ends[index])
            arrow = {
                "name": "output" if flat.kind[index] == F else "gradient",
                "cat": "message",
                "id": next(self.flows),
                "pid": self.process,
            }
            # One nanosecond before the end of the box: at its end, viewers take the next box.
            yield {"ph": "s", **arrow, "tid": rank + 1, "ts": max(begin, end - 1) / 1000}
            arrival = self.at(starts[reader])
            yield {"ph": "f", "bp": "e", **arrow, "tid": there + 1, "ts": arrival / 1000}
