"""A timetable in a terminal, in colour: one row per rank, boxes coloured by kind.

    rank 0   0F0  0F1    .  0B0    .  0B1
    rank 1     .  1F0  1B0  1F1  1B1    .

Or with one character per unit of time, which keeps long schedules and unequal costs readable:

    rank 0  F0F1....B0--..B1--
    rank 1  ..F0B0--F1B1--....

Every box says in letters what it is, so that colour adds comfort and no meaning. Letters as in
`schedules.ir`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TextIO

from schedules.grid import steps
from schedules.ir import Kind, Schedule, ScheduleError
from schedules.palette import ANSI, NAMES, heading, kinds, printable, sizes
from schedules.simulate import Report, simulate

MOST_CHARACTERS = 1_000_000  # of a row of bars


class Cell(NamedTuple):
    """A run of characters of one look; ``kind`` is None for what is not coloured."""

    text: str
    kind: Kind | None = None
    chunk: int = 0


IDLE = "."


def render(
    drawn: Report | Schedule,
    *,
    colour: bool = True,
    width: int | None = None,
    unit: float | None = None,
) -> str:
    """Draw a schedule, or the report of one, as text.

    Args:
      drawn: a schedule, or what `simulate` returned.
      colour: write ANSI escapes, of 256 colours; see `wants_colour`.
      width: characters of a line; rows longer than that go on below. None: they never do.
      unit: how much time one character stands for; a schedule is timed with every F, I and W
        one long. By default every action is one column of the event clock, or one slot in
        lockstep, whatever it costs.

    Raises:
      ScheduleError: a width or unit that is not positive, or a unit too small for the makespan.
    """
    if width is not None and width < 1:
        raise ScheduleError(f"width={width!r}: a line has at least one character; give more")
    schedule = drawn.schedule if isinstance(drawn, Report) else drawn
    if unit is None:
        head = heading(drawn) if isinstance(drawn, Report) else _name(schedule)
        rows = _columns(schedule, _steps(drawn))
    else:
        report = drawn if isinstance(drawn, Report) else simulate(schedule)
        head = f"{heading(report)}   one character = {unit:.6g}"
        rows = [_bar(report, rank, _count(report, unit)) for rank in range(schedule.num_ranks)]
    legend = _legend(schedule, bars=unit is not None)
    below = "".join(_paint(cell, colour) for cell in legend)
    return "\n".join([head, *_fold(rows, width, colour), below])


def wants_colour(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether to write colour to a stream: to terminals, unless the user asks otherwise.

    ``NO_COLOR`` (see no-color.org) and ``FORCE_COLOR`` count where they are set and not empty;
    the first wins. ``FORCE_COLOR=0`` and ``TERM=dumb`` mean no.
    """
    environment = os.environ if environment is None else environment
    if environment.get("NO_COLOR"):
        return False
    if force := environment.get("FORCE_COLOR"):
        return force not in ("0", "false")
    return environment.get("TERM") != "dumb" and stream.isatty()


def _name(schedule: Schedule) -> str:
    return f"{printable(schedule.name)}   {sizes(schedule)}"


def _steps(drawn: Report | Schedule) -> list[list[int]]:
    """[S] lists of columns."""
    if isinstance(drawn, Schedule) or drawn.clock == "event":
        return steps(drawn if isinstance(drawn, Schedule) else drawn.schedule)
    # All ranks start a slot together: the distinct times are the slots that someone uses.
    slots = {start: n for n, start in enumerate(sorted(set().union(*drawn.starts)))}
    return [[slots[start] for start in row] for row in drawn.starts]


def _columns(schedule: Schedule, columns: Sequence[Sequence[int]]) -> list[list[Cell]]:
    """[S] rows of cells of one width; actions of one column share its cell."""
    boxes: list[dict[int, tuple[str, Kind, int]]] = []
    for order, row in zip(schedule.orders, columns, strict=True):
        mine: dict[int, tuple[str, Kind, int]] = {}
        for action, column in zip(order, row, strict=True):
            text = f"{mine[column][0]}&{action}" if column in mine else str(action)
            mine[column] = (text, action.kind, schedule.chunk_of[action.stage])
        boxes.append(mine)
    count = max((max(mine, default=-1) for mine in boxes), default=-1) + 1
    size = max((len(text) for mine in boxes for text, _, _ in mine.values()), default=1)
    return [
        [
            Cell(f" {mine[n][0]:>{size}} ", *mine[n][1:]) if n in mine else Cell(f" {IDLE:>{size}} ")
            for n in range(count)
        ]
        for mine in boxes
    ]


def _count(report: Report, unit: float) -> int:
    """How many characters the makespan takes."""
    if not (math.isfinite(unit) and unit > 0):
        raise ScheduleError(
            f"unit={unit!r}: a character stands for a positive, finite time; give a number > 0"
        )
    if report.makespan / unit > MOST_CHARACTERS:
        raise ScheduleError(
            f"unit={unit!r} makes rows of {report.makespan / unit:.3g} characters, the most is "
            f"{MOST_CHARACTERS}; the makespan is {report.makespan:.6g}, so give a larger unit"
        )
    return max(1, math.ceil(report.makespan / unit - 1e-9))


def _bar(report: Report, rank: int, count: int) -> list[Cell]:
    """One cell per character: an action is labelled as far as the label fits, then filled."""
    schedule = report.schedule
    scale = count / report.makespan if report.makespan else 0.0
    cells = [Cell(IDLE)] * count
    times = zip(schedule.orders[rank], report.starts[rank], report.ends[rank], strict=True)
    for action, start, end in times:
        left, right = round(start * scale), round(end * scale)
        chunk = schedule.chunk_of[action.stage]
        letter = action.kind.lower() if chunk else action.kind
        label = f"{letter}{action.microbatch}"
        text = (label if len(label) <= right - left else letter).ljust(right - left, "-")
        cells[left:right] = [Cell(c, action.kind, chunk) for c in text[: right - left]]
    return cells


def _legend(schedule: Schedule, *, bars: bool) -> list[Cell]:
    cells = [cell for k in kinds([schedule]) for cell in (Cell(f" {k} ", k), Cell(f" {NAMES[k]}  "))]
    cells += [Cell(IDLE), Cell(" idle")]
    if schedule.num_stages > schedule.num_ranks:
        how = "lower case, underlined" if bars else "underlined"
        cells.append(Cell(f"   {how}: a chunk beyond the first"))
    return cells


def _fold(rows: Sequence[Sequence[Cell]], width: int | None, colour: bool) -> Iterable[str]:
    """The rows in blocks no wider than asked, at least one cell wide."""
    label = len(f"rank {len(rows) - 1}  ")
    count = max(map(len, rows), default=0)
    size = len(rows[0][0].text) if count else 1
    wide = count if width is None else max(1, (width - label) // size)
    for first in range(0, count, max(1, wide)):
        if first:
            yield ""
        for rank, row in enumerate(rows):
            text = "".join(_paint(cell, colour) for cell in _joined(row[first : first + wide]))
            yield f"{f'rank {rank}':<{label}}{text if colour else text.rstrip()}"


def _joined(cells: Iterable[Cell]) -> Iterable[Cell]:
    """Neighbours of one look as one cell, so that escapes stay few."""
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
