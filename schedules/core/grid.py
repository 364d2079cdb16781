"""A timetable as text: one row per rank, one column per step, culprits in brackets.

    step      0    1    2    3    4    5
    rank 0  0F0  0F1    .  0B0    .  0B1
    rank 1    .  1F0  1B0  1F1  1B1    .

An overlapped pair shares a cell: ``1F0&2B1``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from schedules.core.action import Action, shorten
from schedules.core.arguments import is_count
from schedules.core.events import run
from schedules.core.flat import flatten, is_dense
from schedules.core.timetable import Timetable

MOST_RANKS, MOST_COLUMNS = 16, 120  # rows and characters of a clipped grid
MOST_OF_A_CELL = 40  # characters of a cell: two numbers of 18 digits fit
GAP = "..."


def grid(
    schedule: Timetable,
    *,
    marks: Collection[tuple[int, int]] = (),
    notes: Mapping[int, str] | None = None,
    clip: bool = False,
) -> str:
    """Draw a schedule, legal or not, as text.

    Columns are steps of the event clock, in which every action and every pair takes one step. If
    that clock never ends, as in a deadlock, each action has the column after the previous one.

    Args:
      marks: (rank, position in its order) of the actions to put in brackets.
      notes: texts to append to the rows of ranks.
      clip: leave out ranks and steps far from any mark, so that the text stays readable.
    """
    columns, notes = steps(schedule), notes or {}
    part = f".{schedule.num_slices}" * (schedule.num_slices > 1)
    cell = len(f"[{schedule.num_stages}F{schedule.num_microbatches}{part}]")
    cell = 2 * cell - 1 if flatten(schedule).pair.any() else cell
    marked = {(rank, columns[rank][position]) for rank, position in marks}
    num_steps = max((row[-1] + 1 for row in columns if row), default=0)
    rows = _shown({r for r, _ in marked} | set(notes), schedule.num_ranks, clip and MOST_RANKS)
    shown = _shown({c for _, c in marked}, num_steps, clip and MOST_COLUMNS // cell)
    lines = [["step", *(GAP if c < 0 else str(c) for c in shown)]]
    for rank in rows:
        cells = dict(in_cells(schedule, columns, rank)) if rank >= 0 else {}
        texts = (GAP if c < 0 else "&".join(map(label, cells.get(c, "."))) for c in shown)
        lines.append([f"rank {rank}", *texts] if rank >= 0 else [GAP])
    brackets = {
        (y, x)
        for y, rank in enumerate(rows, start=1)
        for x, column in enumerate(shown, start=1)
        if (rank, column) in marked
    }
    text = _align(lines, brackets)
    return "\n".join(
        f"{line}  {notes[rank]}" if rank in notes else line
        for line, rank in zip(text, [-1, *rows], strict=True)
    )


def label(action: object) -> str:
    """Write the text of a cell; a value that is no action is written as in Python, shortened."""
    try:
        text = str(action)
    except ValueError:  # an integer of thousands of digits
        return shorten(action)
    return text if len(text) <= MOST_OF_A_CELL and text.isprintable() else shorten(action)


def steps(schedule: Timetable) -> list[list[int]]:
    """Return [S] lists of the column of each action; the two actions of a pair share a column.

    Columns are event-clock steps, or consecutive numbers if that clock never ends.
    """
    flat = flatten(schedule)
    is_placed = all(map(is_count, schedule.placement))
    if schedule.num_ranks and schedule.num_stages and is_placed and is_dense(schedule):
        starts = run(schedule, pair=1)
        if list(map(len, starts)) == list(map(len, schedule.orders)):
            return [row.astype(int).tolist() for row in starts]
    seconds = np.concatenate([[0], np.cumsum(flat.pair)])  # [A + 1] number of pairs before
    columns = np.arange(len(seconds)) - seconds
    bounds = itertools.pairwise(flat.first.tolist())
    return [(columns[begin:end] - columns[begin]).tolist() for begin, end in bounds]


def in_cells(
    schedule: Timetable, columns: Sequence[Sequence[int]], rank: int
) -> Iterator[tuple[int, list[Action]]]:
    """Yield (column, its one or two actions) for all columns of a rank."""
    for column, entries in itertools.groupby(
        zip(columns[rank], schedule.orders[rank], strict=True), key=operator.itemgetter(0)
    ):
        yield column, [action for _, action in entries]


def _align(lines: Sequence[Sequence[str]], brackets: Collection[tuple[int, int]]) -> list[str]:
    """Right-align columns except the first; brackets use the space around their cell."""
    label, *widths = (
        max(map(len, column)) for column in itertools.zip_longest(*lines, fillvalue="")
    )
    pad = " " if brackets else ""
    result = []
    for y, (head, *cells) in enumerate(lines):
        texts = [
            (f"[{cell}]" if (y, x) in brackets else f"{pad}{cell}{pad}").rjust(width + 2)
            for x, (cell, width) in enumerate(zip(cells, widths, strict=False), start=1)
        ]
        result.append(f"{head:<{label}}{pad}{''.join(texts)}".rstrip())
    return result


def _shown(wanted: Collection[int], total: int, limit: int) -> list[int]:
    """Choose at most ``limit`` (0: all) of ``range(total)`` near the wanted; -1 for each gap."""
    if not limit or total <= limit:
        return list(range(total))
    shown: set[int] = set(sorted(wanted or {0})[:limit])
    reach = 0
    while len(shown) < limit:
        reach += 1
        ring = {n + d for n in (wanted or {0}) for d in (-reach, reach)}
        shown.update(sorted(n for n in ring - shown if 0 <= n < total)[: limit - len(shown)])
    result: list[int] = []
    for n in sorted(shown):
        if n > (result[-1] + 1 if result else 0):
            result.append(-1)
        result.append(n)
    return result if result[-1] == total - 1 else [*result, -1]
