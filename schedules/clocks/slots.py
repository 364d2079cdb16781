"""A lockstep layout: the first slot of a pattern in which each action can run.

Letters are those of `schedules.core.action`, A is that of `schedules.core.flat`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from schedules.core.action import KINDS, ScheduleError
from schedules.core.flat import Ints, flatten, once
from schedules.core.messages import links
from schedules.core.schedule import Schedule
from schedules.core.timetable import Timetable

# The kinds that each slot permits: one string for each rank modulo the number of strings.
Pattern = tuple[tuple[str, ...], ...]


def slot_times(schedule: Schedule, pattern: Pattern, *, delayed: bool = False) -> Ints:
    """Find [A] the first slot, from 0, that permits each action's kind and has its message.

    Args:
      schedule: the schedule.
      pattern: the slots of a tick.
      delayed: whether a message to another rank travels during the next slot, and can be used in
        the slot after that.

    Raises:
      ScheduleError: the schedule deadlocks.
    """
    remembered = _known(schedule)
    if (pattern, delayed) not in remembered:
        flat, wires = flatten(schedule), links(schedule)
        first = flat.first.tolist()
        orders = [range(begin, end) for begin, end in itertools.pairwise(first)]
        waits = wait(pattern)[:, flat.kind, flat.rank % max(map(len, pattern))]
        late = wires.crosses & delayed
        slots, _ = fill(
            orders,
            wires.awaited.tolist(),
            wires.sent.tolist(),
            waits.tolist(),
            late.tolist(),
            [0.0] * len(late),
            2 * schedule.num_stages * schedule.num_units,
        )
        times = np.array(slots, np.int64)
        if (times < 0).any():
            raise _deadlock(schedule, times)
        times.setflags(write=False)
        remembered[pattern, delayed] = times
    return remembered[pattern, delayed]


def wait(pattern: Pattern) -> Ints:
    """Return [width, 4, turns] the number of slots from a slot to the next one that permits a kind.

    Ranks that are equal modulo ``turns`` have the same permitted kinds.
    """
    width, turns = len(pattern), max(map(len, pattern))
    ranks = [[slot[turn % len(slot)] for turn in range(turns)] for slot in pattern]
    permits = np.array([[[kind in kinds for kinds in slot] for kind in KINDS] for slot in ranks])
    soon = [np.roll(permits, -slot, axis=0).argmax(axis=0) for slot in range(width)]
    return np.stack(soon)


@once
def _known(schedule: Timetable) -> dict[tuple[Pattern, bool], Ints]:  # noqa: ARG001  `once` keeps it there
    return {}


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
      durations: for each action, its duration.
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


def _deadlock(schedule: Schedule, times: Ints) -> ScheduleError:
    """Make the error for ranks that wait for each other in a circle."""
    rows = np.split(times, flatten(schedule).first[1:-1])
    stuck = ", ".join(
        f"rank {rank} at {order[int(np.argmax(row < 0))]}"
        for rank, (order, row) in enumerate(zip(schedule.orders, rows, strict=True))
        if (row < 0).any()
    )
    return ScheduleError(
        f"schedule {schedule.name!r} deadlocks: {stuck}; "
        f"schedules.check(schedule) shows the grid and the culprit"
    )
