"""Times of actions in lockstep: ticks of a few slots, and exchanges after them.

A message sent in one slot can be used in the next slot. `schedules.clocks.lockstep` computes the
durations of slots.

Sends may be *delayed*: the exchange of a slot then runs during the work of the next slot, and its
messages can be used from the slot after the next. Messages that stay on their rank are not delayed.
Letters are those of `schedules.core.action`, A is that of `schedules.core.flat`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedules.clocks.slots import Pattern, slot_times
from schedules.core.action import KINDS, ScheduleError, shorten
from schedules.core.arguments import is_one_of
from schedules.core.capacity import check_slots_fit
from schedules.core.flat import Ints, flatten
from schedules.core.messages import links
from schedules.core.schedule import Schedule

PATTERNS: dict[str, Pattern] = {
    "single": (("FBIW",),),
    "paired": (("F",), ("BIW",)),
    "unit": (("F",), ("BI",), ("W",)),
    "partner": (("FW", "BIW"), ("BIW", "FW")),
}


@dataclass(frozen=True, eq=False)
class Ticks:
    """A schedule laid out in slots.

    Attributes:
      schedule: the schedule; no rank's order has changed.
      name: the name of the layout's slot pattern.
      times: [A] the time of each action, counted in slots; time t is slot ``t % width`` of tick
        ``t // width``.
      delayed: whether messages to other ranks travel during the next slot.
    """

    schedule: Schedule
    name: str
    times: Ints
    delayed: bool = False

    @property
    def pattern(self) -> Pattern:
        """Kinds of actions that each slot of a tick permits."""
        return PATTERNS[self.name]

    @property
    def width(self) -> int:
        """Slots per tick."""
        return len(self.pattern)

    @property
    def num_ticks(self) -> int:
        """The number of ticks T."""
        return int(self.times.max(initial=-1)) // self.width + 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that some rank may run in each slot."""
        return tuple("".join(k for k in KINDS if k in "".join(slot)) for slot in self.pattern)


def lay_out(schedule: Schedule, name: str, *, delayed: bool = False) -> Ticks:
    """Run every action in the first slot that permits its kind and has its message.

    On one rank no message is delayed, because no message leaves the rank.

    Raises:
      ScheduleError: the schedule deadlocks, or its slots need more memory than there is.
    """
    delayed &= schedule.num_ranks > 1
    times = slot_times(schedule, PATTERNS[name], delayed=delayed)
    ticks = Ticks(schedule, name, times, delayed)
    check_slots_fit(schedule, ticks.num_ticks * ticks.width)
    return ticks


def exchanges(ticks: Ticks) -> int:
    """Count the permutations of ranks that run: all permutations of every slot, at every tick."""
    path, ranks = links(ticks.schedule), ticks.schedule.num_ranks
    slot = ticks.times[path.crosses] % ticks.width
    shift = (path.target - flatten(ticks.schedule).rank)[path.crosses] % ranks
    return ticks.num_ticks * len(np.unique(slot * ranks + shift))


def check_pattern(pattern: str) -> None:
    """Check the name of a slot pattern.

    Raises:
      ScheduleError: an unknown name.
    """
    if not is_one_of(pattern, PATTERNS):
        raise ScheduleError(
            f"pattern={shorten(pattern)} is not a slot pattern; choose one of {sorted(PATTERNS)}, "
            f"or leave it out for the fastest"
        )
