"""A timetable in a terminal, in colour: one row per rank, boxes coloured by kind.

    rank 0   0F0  0F1    .  0B0    .  0B1
    rank 1     .  1F0  1B0  1F1  1B1    .

Or with one character per unit of time, which keeps long schedules and unequal costs readable:

    rank 0  F0F1....B0--..B1--
    rank 1  ..F0B0--F1B1--....

Every box has its action in letters, so that colour only adds comfort. An overlapped pair shares a
column, ``1F0&2B1``, and in bars its two actions are joined by ``&``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from schedules.clocks.report import Report, sizes
from schedules.clocks.simulate import simulate
from schedules.clocks.ticks import lay_out
from schedules.core.action import Action, Kind, ScheduleError, printable, shorten
from schedules.core.arguments import is_number, need
from schedules.core.flat import flatten
from schedules.core.grid import in_cells, steps
from schedules.core.schedule import Schedule
from schedules.tools.palette import (
    ANSI,
    NAMES,
    TOGETHER,
    heading,
    joined,
    kinds,
    unit_text,
)

MOST_CHARACTERS = 1_000_000  # most characters of a row of bars


class Cell(NamedTuple):
    """A run of characters with one style; ``kind`` is None for text without colour."""

    text: str
    kind: Kind | None = None
    chunk: int = 0


Runs = tuple[Cell, ...]  # the content of one column
IDLE = "."
SHARED = "="


def render(
    drawn: Report | Schedule,
    *,
    colour: bool = True,
    width: int | None = None,
    unit: float | None = None,
) -> str:
    """Draw a schedule, or the report of one, as text.

    Args:
      drawn: a schedule, or a report of `simulate`.
      colour: write ANSI escapes, of 256 colours; see `wants_colour`.
      width: characters of a line; longer rows are folded. None: rows are never folded.
      unit: the time of one character; a schedule is timed with durations of 1 for F, I and W. By
        default every action takes one column of the event clock, or one slot in lockstep,
        independent of its cost.

    Raises:
      ScheduleError: a width or unit is not positive, or the unit is too small for the makespan.
    """
    if not isinstance(drawn, Report):
        need("drawn", drawn, Schedule, "give a schedule, or what simulate() returned")
    if width is not None and not (is_number(width) and width >= 1):
        raise ScheduleError(f"width={shorten(width)}: a line has at least one character; give more")
    schedule = drawn.schedule if isinstance(drawn, Report) else drawn
    if unit is None:
        head = (
            heading(drawn)
            if isinstance(drawn, Report)
            else f"{printable(schedule.name)}   {sizes(schedule)}"
        )
        rows = _columns(schedule, _steps(drawn))
    else:
        report = drawn if isinstance(drawn, Report) else simulate(schedule)
        count = _count(report, unit)
        head = f"{heading(report)}   one character = {unit:.6g}"
        rows = [_bar(report, rank, count) for rank in range(schedule.num_ranks)]
    legend = _legend(schedule, bars=unit is not None)
    if unit is not None and report.common:
        legend.append(Cell(f"   {SHARED}  {TOGETHER}"))
    below = "".join(_paint(cell, colour) for cell in legend)
    return "\n".join([head, *_fold(rows, width, colour), below])


def wants_colour(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Tell whether to write colour to a stream: to terminals, unless the user decides otherwise.

    ``NO_COLOR`` (see no-color.org) and ``FORCE_COLOR`` count if they are set and not empty; the
    first wins. ``FORCE_COLOR=0`` and ``TERM=dumb`` mean no.
    """
    environment = os.environ if environment is None else environment
    if environment.get("NO_COLOR"):
        return False
    if force := environment.get("FORCE_COLOR"):
        return force not in ("0", "false")
    return environment.get("TERM") != "dumb" and stream.isatty()


def _steps(drawn: Report | Schedule) -> Sequence[Sequence[int]]:
    schedule = drawn.schedule if isinstance(drawn, Report) else drawn
    if not isinstance(drawn, Report) or drawn.pattern is None:
        return steps(schedule)
    ticks = lay_out(schedule, drawn.pattern, delayed=drawn.delayed)
    used, slots = np.unique(ticks.times, return_inverse=True)
    rows = flatten(schedule).by_rank(slots.reshape(-1))
    return [row.tolist() for row in rows] if len(used) else []


def _columns(schedule: Schedule, columns: Sequence[Sequence[int]]) -> list[list[Runs]]:
    """Return [S] rows of runs, each as wide as its column."""
    cells = [dict(in_cells(schedule, columns, rank)) for rank in range(schedule.num_ranks)]
    count = max((column + 1 for mine in cells for column in mine), default=0)
    widths = [
        max(len("&".join(map(str, mine.get(n, (IDLE,))))) for mine in cells) for n in range(count)
    ]
    return [
        [_runs(schedule, mine.get(n, ()), width) for n, width in enumerate(widths)]
        for mine in cells
    ]


def _runs(schedule: Schedule, actions: Sequence[Action], width: int) -> Runs:
    """Make the cells of a column's one or two actions, or of idle time."""
    if not actions:
        return (Cell(f" {IDLE:>{width}} "),)
    looks = [(action.kind, schedule.chunk_of[action.stage]) for action in actions]
    *front, last = map(str, actions)
    left = "".join(f"{text}&" for text in front)
    texts = [f" {left:>{width - len(last)}}", f"{last} "]
    if not front:
        texts = ["".join(texts)]
    return tuple(Cell(text, *look) for text, look in zip(texts, looks, strict=True))


def _count(report: Report, unit: float) -> int:
    """Return the number of characters of the makespan."""
    if not (is_number(unit) and math.isfinite(unit) and unit > 0):
        raise ScheduleError(
            f"unit={shorten(unit)}: a character stands for a positive, finite time; give a number "
            f"> 0"
        )
    if report.makespan / unit > MOST_CHARACTERS:
        raise ScheduleError(
            f"unit={unit!r} makes rows of {report.makespan / unit:.3g} characters, the most is "
            f"{MOST_CHARACTERS}; the makespan is {report.makespan:.6g}, so give a larger unit"
        )
    return max(1, math.ceil(report.makespan / unit - 1e-9))


def _bar(report: Report, rank: int, count: int) -> list[Runs]:
    """Draw a rank's bar, one run per character: an action's label as far as it fits, then fill."""
    schedule = report.schedule
    scale = count / report.makespan if report.makespan else 0.0
    cells = [Cell(IDLE)] * count
    for start, end in report.common:
        left, right = round(start * scale), round(end * scale)
        cells[left:right] = [Cell(SHARED)] * (right - left)
    times = zip(schedule.orders[rank], report.starts[rank], report.ends[rank], strict=True)
    for action, start, end in times:
        left, right = round(start * scale), round(end * scale)
        chunk = schedule.chunk_of[action.stage]
        letter = action.kind.lower() if chunk else action.kind
        label = f"{letter}{unit_text(action)}"
        text = (label if len(label) <= right - left else letter).ljust(right - left, "-")
        cells[left:right] = [Cell(c, action.kind, chunk) for c in text[: right - left]]
    for position in joined(report, rank):
        last = round(report.ends[rank][position] * scale) - 1
        if cells[last].text == "-":
            cells[last] = cells[last]._replace(text="&")
    return [(cell,) for cell in cells]


def _legend(schedule: Schedule, *, bars: bool) -> list[Cell]:
    cells = [
        cell for k in kinds([schedule]) for cell in (Cell(f" {k} ", k), Cell(f" {NAMES[k]}  "))
    ]
    cells += [Cell(IDLE), Cell(" idle")]
    if schedule.num_stages > schedule.num_ranks:
        how = "lower case, underlined" if bars else "underlined"
        cells.append(Cell(f"   {how}: a chunk beyond the first"))
    return cells


def _fold(rows: Sequence[Sequence[Runs]], width: int | None, colour: bool) -> Iterable[str]:
    """Yield the rows in blocks of at most ``width`` characters, and at least one column."""
    label = len(f"rank {len(rows) - 1}  ")
    room = math.inf if width is None else width - label
    cuts, used = [0], 0
    for n, runs in enumerate(rows[0] if rows else ()):
        size = sum(len(cell.text) for cell in runs)
        used += size
        if used > room and n > cuts[-1]:
            cuts.append(n)
            used = size
    for first, stop in itertools.pairwise([*cuts, None]):
        if first:
            yield ""
        for rank, row in enumerate(rows):
            cells = itertools.chain.from_iterable(row[first:stop])
            text = "".join(_paint(cell, colour) for cell in _joined(cells))
            yield f"{f'rank {rank}':<{label}}{text if colour else text.rstrip()}"


def _joined(cells: Iterable[Cell]) -> Iterable[Cell]:
    """Join neighbouring cells of one style, to write few escapes."""
    pending: Cell | None = None
    for cell in cells:
        if pending is not None and pending[1:] == cell[1:]:
            pending = cell._replace(text=pending.text + cell.text)
            continue
        if pending is not None:
            yield pending
        pending = cell
    if pending is not None:
        yield pending


def _paint(cell: Cell, colour: bool) -> str:
    if not colour:
        return cell.text
    if cell.kind is None:
        return f"\x1b[2m{cell.text}\x1b[0m" if cell.text.strip(f"{IDLE} ") == "" else cell.text
    back, ink = ANSI[cell.kind][min(cell.chunk, 1)]
    underline = "4;" if cell.chunk else ""
    return f"\x1b[{underline}38;5;{ink};48;5;{back}m{cell.text}\x1b[0m"
