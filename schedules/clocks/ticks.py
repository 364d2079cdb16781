"""Times of actions in lockstep: ticks of a few slots, and exchanges after them.

A message sent in one slot can be used in the next slot. `schedules.clocks.lockstep` computes the
durations of slots.

Sends may be *delayed*: the exchange of a slot then runs during the work of the next slot, and its
messages can be used from the slot after the next. Messages that stay on their rank are not delayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.core.action import KINDS, ScheduleError, shorten
from schedules.core.arguments import is_one_of
from schedules.core.capacity import check_slots_fit
from schedules.core.check import check
from schedules.core.flat import Ints, flatten, once
from schedules.core.messages import links
from schedules.core.schedule import Schedule
from schedules.core.timetable import Timetable

# The kinds that each slot permits: one string for each rank modulo the number of strings.
Pattern = tuple[tuple[str, ...], ...]


@once
def slot_times(schedule: Timetable, pattern: Pattern, *, delayed: bool = False) -> Ints:
    """Find [A] the first slot, from 0, that permits each action's kind and has its message.

    With ``delayed`` a message to another rank can be used one slot later.
    """
    flat, wires = flatten(schedule), links(schedule)
    waits = wait(pattern)[:, flat.kind, flat.rank % max(map(len, pattern))]
    late = wires.crosses & delayed
    slots, _ = fill(
        [range(begin, end) for begin, end in itertools.pairwise(flat.first.tolist())],
        wires.awaited.tolist(),
        wires.sent.tolist(),
        waits.tolist(),
        late.tolist(),
        [0.0] * len(late),
        2 * schedule.num_stages * schedule.num_units,
    )
    times = np.array(slots, np.int64)
    if (times < 0).any():  # a deadlock, or an action without its message
        check(schedule)
        raise AssertionError("a legal schedule never ends in lockstep")
    times.setflags(write=False)
    return times


def wait(pattern: Pattern) -> Ints:
    """Return [width, 4, turns] the number of slots from a slot to the next one that permits a kind.

    Ranks that are equal modulo ``turns`` have the same permitted kinds.
    """
    width, turns = len(pattern), max(map(len, pattern))
    ranks = [[slot[turn % len(slot)] for turn in range(turns)] for slot in pattern]
    permits = np.array([[[kind in kinds for kinds in slot] for kind in KINDS] for slot in ranks])
    soon = [np.roll(permits, -slot, axis=0).argmax(axis=0) for slot in range(width)]
    return np.stack(soon)


def fill(
    orders: Sequence[Sequence[int]],
    awaited: Sequence[int],
    sent: Sequence[int],
    waits: Sequence[Sequence[int]],
    late: Sequence[bool],
    durations: Sequence[float],
    num_messages: int,
) -> tuple[list[int], list[float]]:
    """Find each action's slot, -1 if it never runs, and the duration of each slot's longest action.

    Actions are placed rank by rank, on each rank as far as possible.

    Args:
      orders: [S] numbers of actions, in the order of each rank.
      awaited: for each action, the message that it needs to start, or -1.
      sent: for each action, the message that it sends, or -1.
      waits: [width] and for each action, the number of slots until a slot permits it.
      late: for each action, whether its message travels during the next slot.
      num_messages: more than the number of any message.
    """
    width = len(waits)
    usable, waiting = [-1] * num_messages, [-1] * num_messages  # first slot; the rank that waits
    times = [-1] * len(awaited)
    work: list[float] = []
    position, free = [0] * len(orders), [0] * len(orders)
    todo = list(range(len(orders)))
    while todo:
        rank = todo.pop()
        order, now = orders[rank], free[rank]
        n, size = position[rank], len(orders[rank])
        while n < size:
            code = order[n]
            message = awaited[code]
            if message >= 0:
                there = usable[message]
                if there < 0:
                    waiting[message] = rank
                    break
                if there > now:  # noqa: PLR1730  a call of max() would double the loop's time
                    now = there
            now += waits[now % width][code]
            times[code] = now
            while now >= len(work):
                work.append(0.0)
            if durations[code] > work[now]:  # noqa: PLR1730
                work[now] = durations[code]
            now += 1
            message = sent[code]
            if message >= 0:
                usable[message] = now + late[code]
                if waiting[message] >= 0:
                    todo.append(waiting[message])
            n += 1
        position[rank], free[rank] = n, now
    return times, work


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
        return PATTERNS[self.name]

    @property
    def width(self) -> int:
        return len(self.pattern)

    @property
    def num_ticks(self) -> int:
        return int(self.times.max(initial=-1)) // self.width + 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that some rank may run in each slot."""
        return tuple("".join(k for k in KINDS if k in "".join(slot)) for slot in self.pattern)


def lay_out(schedule: Schedule, name: str, *, delayed: bool = False) -> Ticks:
    """Run every action in the first slot that permits its kind and has its message.

    On one rank no message is delayed, because no message leaves the rank.
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
    if not is_one_of(pattern, PATTERNS):
        raise ScheduleError(
            f"pattern={shorten(pattern)} is not a slot pattern; choose one of {sorted(PATTERNS)}, "
            f"or leave it out for the fastest"
        )
