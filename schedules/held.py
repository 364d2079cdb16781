"""How many stage inputs a rank holds, over time: what a report's peaks are the peaks of.

An input is held from the start of its F to the end of its B or, split, of its W; without any
backward, while its F runs. Letters as in `schedules.ir`.
"""

from __future__ import annotations

from schedules.report import Report


def held(report: Report) -> tuple[tuple[tuple[float, int], ...], ...]:
    """[S] tuples of (time, inputs held from then on), in order of time, one per change."""
    return tuple(_rank(report, rank) for rank in range(report.schedule.num_ranks))


def _rank(report: Report, rank: int) -> tuple[tuple[float, int], ...]:
    frees = ("F",) if report.schedule.is_forward else ("B", "W")
    changes: list[tuple[float, int]] = []
    times = zip(report.schedule.orders[rank], report.starts[rank], report.ends[rank], strict=True)
    for action, start, end in times:
        if action.kind == "F":
            changes.append((start, 1))
        if action.kind in frees:
            changes.append((end, -1))
    count = 0
    steps: list[tuple[float, int]] = []
    for time, change in changes:  # in order: a rank runs one action after the other
        count += change
        steps.append((time, count))
    return tuple(steps)
