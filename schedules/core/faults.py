"""The errors of `check`: every fault at once, under a grid that marks the culprits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.core.action import ScheduleError, shorten
from schedules.core.grid import grid
from schedules.core.timetable import Timetable

MOST_NAMED = 8  # named and marked culprits of one fault; the others are counted
MOST_CHARACTERS = 600  # of all their names


@dataclass(frozen=True)
class Culprit:
    """One place where a rule is broken.

    Attributes:
      text: the text of the place.
      marks: (rank, position in its order) of the actions to mark.
      missing: (rank, action) of a missing action, to write next to the rank's row.
    """

    text: str
    marks: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, str] | None = None


@dataclass(frozen=True)
class Fault:
    """A broken rule.

    Attributes:
      what: the fault.
      rule: the broken rule, and the remedy.
      culprits: the first few places.
      count: the number of places.
    """

    what: str
    rule: str
    culprits: Sequence[Culprit]
    count: int


def error(schedule: Timetable, faults: Sequence[Fault]) -> ScheduleError:
    """Make one error for all faults."""
    total = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    sizes = (
        f"S={schedule.num_ranks} ranks, K={schedule.num_stages} stages, "
        f"M={schedule.num_microbatches} microbatches"
        f"{f', N={schedule.num_slices} slices' if schedule.num_slices > 1 else ''}"
    )
    lines = [f"schedule {shorten(schedule.name, 120)} ({sizes}) has {total}"]
    marks: list[tuple[int, int]] = []
    notes: dict[int, str] = {}
    for fault in faults:
        named, count = "; ".join(culprit.text for culprit in fault.culprits), len(fault.culprits)
        if len(named) > MOST_CHARACTERS:  # a circle of many ranks, or numbers of many digits
            named = f"{named[: MOST_CHARACTERS - 3]}..."
        more = f"; and {fault.count - count} more" if fault.count > count else ""
        lines += [f"- {fault.what}: {named}{more}", f"  {fault.rule}"]
        for culprit in fault.culprits:
            marks += culprit.marks
            if culprit.missing is not None:
                rank, action = culprit.missing
                notes[rank] = f"{notes.get(rank, 'missing')} {action}"
    if schedule.num_ranks:
        lines.append(grid(schedule, marks=marks, notes=notes, clip=True))
    return ScheduleError("\n".join(lines))
