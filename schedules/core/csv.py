"""Timetables as CSV files: one row per rank, one column per step, an empty cell for idle.

``torch.distributed.pipelining`` has this grammar; here only compute actions are allowed:

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

An overlapped pair is a cell like ``(1F0;2B1)OVERLAP_F_B``. Files of torch 2.5 and 2.6 are read too;
they have BW for a whole backward and B for its first half.

A cell has no comma and no line break, so rows and cells are split without a CSV parser. Then every
byte of a file has a row and a column, which errors name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from schedules.core.action import Action, ScheduleError, shorten
from schedules.core.files import read, replace, shown
from schedules.core.grid import in_cells, steps
from schedules.core.timetable import Timetable

Orders = list[list[Action | list[Action]]]  # an inner list is a pair of actions

MOST_CELLS = 8  # bad cells that an error names; the others are counted

_LINE_END = re.compile(r"\r\n|\n|\r")
_OLDER = re.compile(r"(\d+)(BW|B|I|W)(\d+)")
_OVERLAP = re.compile(r"\(.*\)\s*OVERLAP\w*")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)\s*OVERLAP_F_B")
_TRAFFIC = re.compile(
    r"\d*(WAIT_)?((SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*"  # in torch 2.15
)


def to_csv(schedule: Timetable, path: str | os.PathLike[str]) -> None:
    columns = steps(schedule)
    width = max((row[-1] + 1 for row in columns if row), default=0)
    lines = []
    for rank in range(schedule.num_ranks):
        cells = [""] * width
        for column, actions in in_cells(schedule, columns, rank):
            text = ";".join(map(str, actions))
            cells[column] = f"({text})OVERLAP_F_B" if len(actions) > 1 else text
        lines.append(",".join(cells) + "\n")
    replace("".join(lines), path)


def read_csv(path: str | os.PathLike[str]) -> Orders:
    """Read the orders in a file, one for each row, as `schedules.from_orders` takes them."""
    return _orders(path, _as_of_now(_rows(path)))


def _rows(path: str | os.PathLike[str]) -> list[list[str]]:
    where, data = shown(path), read(path, "the path of a CSV file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        row, column = before.count(b"\n") + 1, before[before.rfind(b"\n") + 1 :].count(b",") + 1
        raise ScheduleError(
            f"{where}: row {row}, column {column}: byte 0x{data[error.start]:02x} is not UTF-8; "
            f"save the file as CSV in UTF-8"
        ) from None
    lines = _LINE_END.split(text)
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ScheduleError(
            f"{where}: is empty; a timetable has one row per rank and a cell per action, like 0F0"
        )
    return [[_unquote(cell.strip()) for cell in line.split(",")] for line in lines]


def _as_of_now(rows: list[list[str]]) -> list[list[str]]:
    """Convert cells of the older torch notation to the notation of torch 2.7 and later.

    A file has the older notation if it has a BW, or if it has no I, and W for exactly the stages
    and microbatches of its B. In the later notation a B is whole, and has no W.
    """
    parts = [part for row in rows for cell in row for part in _parts(cell)]
    matches = [match for match in map(_OLDER.fullmatch, parts) if match is not None]
    halves: dict[str, set[tuple[str, str]]] = {kind: set() for kind in ("B", "BW", "I", "W")}
    for match in matches:
        halves[match[2]].add((match[1], match[3]))
    is_by_halves = bool(halves["W"]) and halves["W"] == halves["B"] and not halves["I"]
    if not halves["BW"] and not is_by_halves:
        return rows
    return [[_OLDER.sub(_renamed, cell) for cell in row] for row in rows]


def _renamed(action: re.Match[str]) -> str:
    kind = {"BW": "B", "B": "I"}.get(action[2], action[2])
    return f"{action[1]}{kind}{action[3]}"


def _unquote(cell: str) -> str:
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"'
    return cell[1:-1].strip() if quoted else cell


def _orders(path: str | os.PathLike[str], rows: Sequence[Sequence[str]]) -> Orders:
    """Parse the actions and pairs of every row; raise for cells that are neither."""
    num_actions = sum(len(_parts(cell)) for row in rows for cell in row if cell)
    orders: Orders = []
    faults: list[str] = []
    for row, cells in enumerate(rows, start=1):
        orders.append([])
        for column, cell in enumerate(cells, start=1):
            if cell:
                parsed = [_parse(part, num_actions) for part in _parts(cell)]
                wrong = next((part for part in parsed if isinstance(part, str)), None)
                actions = [part for part in parsed if isinstance(part, Action)]
                if wrong is not None:
                    faults.append(f"row {row}, column {column}: {wrong}")
                else:
                    orders[-1].append(actions if len(actions) > 1 else actions[0])
    if faults:
        more = len(faults) - MOST_CELLS
        named = [*faults[:MOST_CELLS], f"and {more} more"] if more > 0 else faults
        raise ScheduleError(f"{shown(path)}: " + "\n".join(named))
    return orders


def _parts(cell: str) -> list[str]:
    """Return the actions of a cell: one action, or the two of a pair."""
    pair = _PAIR.fullmatch(cell)
    return [cell] if pair is None else [part.strip() for part in pair.groups()]


def _parse(cell: str, num_actions: int) -> Action | str:
    """Parse the action in a cell, or return its fault."""
    try:
        action = Action.parse(cell)
    except ScheduleError as error:
        return _foreign(cell) or str(error)
    # A legal file has K * M actions or more, so all its numbers are smaller than their count.
    for word, number in (("stage", action.stage), ("microbatch", action.microbatch)):
        if number >= num_actions:
            return (
                f"action {cell} is of {word} {number}, but the file has {num_actions} actions in "
                f"all; every {word} from 0 on takes part, so correct the number"
            )
    return action


def _foreign(cell: str) -> str | None:
    """Write the error for actions that only ``torch.distributed.pipelining`` has."""
    if _OVERLAP.fullmatch(cell):
        return (
            f"{shorten(cell)} is not a pair of actions; write an F and a backward of another "
            f"stage, like (1F0;2B1)OVERLAP_F_B"
        )
    if _TRAFFIC.fullmatch(cell):
        return (
            f"{shorten(cell)} is a communication action of torch.distributed.pipelining; messages "
            f"follow from the compute actions here, so export those only "
            f'(format="compute_only")'
        )
    return None
