"""A schedule: a timetable that can be read and written as files, text and hand-written orders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from schedules.core.action import Action, ScheduleError, shorten
from schedules.core.check import check
from schedules.core.files import shown
from schedules.core.grid import grid
from schedules.core.timetable import Timetable


class Schedule(Timetable):
    """A timetable that can be read from and written to CSV files, and is printed as a grid.

    It has the attributes of `schedules.core.timetable.Timetable`.
    """

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule as a CSV file: one row per rank, an empty cell for an idle step.

        The file is replaced at once: a reader gets the whole old file or the whole new file.

        Raises:
          OSError: the file cannot be written.
        """
        from schedules.core.csv import to_csv

        to_csv(self, path)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], *, name: str | None = None) -> Schedule:
        """Read a CSV file and check it.

        Args:
          path: a file in the format of `to_csv` or ``torch.distributed.pipelining``. A byte order
            mark, any line ends, spaces around actions and blank lines at the end are accepted.
          name: the schedule's name; by default the file's name without its suffix.

        Raises:
          ScheduleError: a missing file, invalid text, an unknown action (with its row and column),
            or an illegal schedule (with the grid of `check`).
        """
        from schedules.core.csv import read_csv

        orders = read_csv(path)
        try:
            stem = Path(os.fsdecode(path)).stem
            return check(from_orders(orders, name=stem if name is None else name))
        except ScheduleError as error:
            raise ScheduleError(f"{shown(path)}: {error}") from None

    def __str__(self) -> str:
        """Format the timetable as a grid, clipped if it is too large to read."""
        return grid(self, clip=True)


def from_orders(
    orders: Sequence[Sequence[Action | str | Sequence[Action | str]]],
    *,
    name: str = "custom",
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Make a schedule from orders; infer M, the slices and, unless given, the placement.

    Args:
      orders: [S] sequences of actions, each an `Action` or text like ``"3F0"``, or ``"3F0.1"`` if
        microbatches are cut into slices. An overlapped pair is text like ``"1F0&2B1"``, or a tuple
        or list of two actions.
      name: the schedule's name.
      placement: [K] the rank of each stage.

    Raises:
      ScheduleError: an action that does not parse, or a stage that no rank holds. `check` tells
        whether the schedule is legal.
    """
    parsed: list[tuple[Action, ...]] = []
    pairs: list[tuple[int, ...]] = []
    for order in _items("orders", orders, "one sequence of actions for each rank"):
        actions: list[Action] = []
        positions: list[int] = []
        for item in _items("orders", order, "one sequence of actions for each rank"):
            pair = _read(item)
            if len(pair) == 2:
                positions.append(len(actions))
            actions += pair
        parsed.append(tuple(actions))
        pairs.append(tuple(positions))
    placement = (
        _read_placement(parsed)
        if placement is None
        else _items("placement", placement, "one rank for each stage")
    )
    microbatches = 1 + max((a.microbatch for order in parsed for a in order), default=-1)
    slices = 1 + max((a.slice or 0 for order in parsed for a in order), default=0)
    return Schedule(
        name, microbatches, tuple(parsed), tuple(placement), tuple(pairs), num_slices=slices
    )


def _items(argument: str, value: Iterable[Any], wanted: str) -> tuple[Any, ...]:
    """Convert a sequence to a tuple, and numpy's integers to Python's."""
    try:
        if not isinstance(value, str):
            return tuple(getattr(value, "tolist", lambda: value)())
    except TypeError:  # not iterable
        pass
    raise ScheduleError(f"{argument} hold {shorten(value)}, which is not {wanted}; give that")


def _read(item: object) -> list[Action]:
    """Read one action, or the two actions of a pair."""
    parts: Sequence[object]
    if isinstance(item, str):
        parts = item.split("&") if item.count("&") == 1 else [item]
    elif isinstance(item, tuple | list) and not isinstance(item, Action) and len(item) == 2:
        parts = item
    else:
        parts = [item]
    actions = [Action.parse(part) if isinstance(part, str) else part for part in parts]
    if not all(map(_is_action, actions)):
        raise ScheduleError(
            f"orders hold {shorten(item)}, which is neither an action nor a pair of two; write an "
            f"action like '3F0' and a pair like '1F0&2B1'"
        )
    return actions  # type: ignore[return-value]


def _is_action(item: object) -> bool:
    """Tell whether a value is an action with integer fields; `check` tests the integers."""
    if not isinstance(item, Action) or not type(item.stage) is type(item.microbatch) is int:
        return False
    return item.slice is None or type(item.slice) is int


def _read_placement(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Find [K] the rank with most actions of each stage, so that a misplaced action stands out."""
    tally: dict[int, Counter[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            tally.setdefault(action.stage, Counter())[rank] += 1
    rank_of = {stage: ranks.most_common(1)[0][0] for stage, ranks in tally.items()}
    # If one of K distinct stages is not in 0..K-1, a stage in 0..K-1 is missing.
    gap = next((k for k in range(len(rank_of)) if k not in rank_of), None)
    if gap is not None:
        stray = next(k for k in rank_of if not 0 <= k < len(rank_of))
        raise ScheduleError(
            f"orders mention stage {shorten(stray)} but never stage {gap}; stages are numbered "
            f"0..K-1 without gaps, so add stage {gap} or renumber"
        )
    return tuple(rank_of[k] for k in range(len(rank_of)))
