"""The first slot of a pattern in which each action can run: what a lockstep layout is.

Letters as in `schedules.core.action`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

import itertools

import numpy as np

from schedules.core.action import KINDS
from schedules.core.flat import Ints, Mask, breadth, flatten, once
from schedules.core.timetable import Timetable
from schedules.core.walk import follow, order
from schedules.schedule import Schedule

# What a slot permits: strings of kinds, taken in turn by rank modulo their number.
Pattern = tuple[tuple[str, ...], ...]

MANY = 24  # ranks that work at a time; from here on it is quicker to fill slots for all of them


def slot_times(schedule: Schedule, pattern: Pattern, *, delayed: bool = False) -> Ints:
    """[A] the slot of each action, counted from 0: it permits the kind and the message is there.

    Args:
      schedule: what is laid out.
      pattern: the slots of a tick.
      delayed: a message to another rank travels during the slot after its own, and can be used in
        the one after that.

    Raises:
      ScheduleError: the schedule deadlocks.
    """
    known = _known(schedule)
    if (pattern, delayed) not in known:
        flat, turns = flatten(schedule), max(map(len, pattern))
        permits = np.array(
            [
                [kind in slot[turn % len(slot)] for turn in range(turns) for kind in KINDS]
                for slot in pattern
            ]
        )
        code = flat.rank % turns * len(KINDS) + flat.kind
        fill = _by_slot if breadth(schedule) >= MANY else _by_action
        times = fill(schedule, permits, code, follow(schedule).crosses & delayed)
        times.setflags(write=False)
        known[pattern, delayed] = times
    return known[pattern, delayed]


@once
def _known(schedule: Timetable) -> dict[tuple[Pattern, bool], Ints]:  # noqa: ARG001  `once` keeps it there
    return {}


def _by_action(schedule: Schedule, permits: Mask, code: Ints, late: Mask) -> Ints:
    """Action by action. ``permits`` is [slots, codes]; ``code`` and ``late``, of messages, [A]."""
    width, flat, path = len(permits), flatten(schedule), follow(schedule)
    # wait[code][t % width] is how many slots after t the next that permits it comes.
    wait = [
        [next(d for d in range(width) if column[(s + d) % width]) for s in range(width)]
        for column in permits.T.tolist()
    ]
    rank, awaited, sent = flat.rank.tolist(), path.awaited.tolist(), path.sent.tolist()
    waits, lasting = [wait[c] for c in code.tolist()], (1 + late).tolist()
    free = [0] * schedule.num_ranks
    usable = [0] * (2 * schedule.num_stages * schedule.num_microbatches + 1)  # the last is no one's
    times = [0] * len(rank)
    for n in order(schedule).tolist():
        here = rank[n]
        start = max(free[here], usable[awaited[n]])
        start += waits[n][start % width]
        times[n] = start
        free[here] = start + 1
        message = sent[n]
        if message >= 0:
            usable[message] = start + lasting[n]
    return np.array(times, np.int64)


def _by_slot(schedule: Schedule, permits: Mask, code: Ints, late: Mask) -> Ints:
    """The same, slot by slot, all ranks at a time."""
    first, path, width = flatten(schedule).first, follow(schedule), len(permits)
    count = len(code)
    # Behind the messages: one that is always there, one that never comes, one that nobody awaits.
    always = 2 * schedule.num_stages * schedule.num_microbatches
    never, lost = always + 1, always + 2
    there = np.zeros(always + 3, bool)
    there[always] = True
    awaited = np.append(np.where(path.awaited < 0, always, path.awaited), never)
    sent = np.where(path.sent < 0, lost, path.sent)
    code = np.append(code, 0)
    begin, end = first[:-1], first[1:]
    after = np.arange(1, count + 1)
    after[end[end > begin] - 1] = count  # who has ended waits for ever
    position = np.where(end > begin, begin, count)
    times, latest = np.full(count, -1), -1
    under_way, patience = sent[:0], width + int(late.any())
    for time in itertools.count():
        ready = there[awaited[position]] & permits[time % width][code[position]]
        ranks = np.flatnonzero(ready)
        there[under_way] = True
        under_way = sent[:0]
        if len(ranks):
            now = position[ranks]
            times[now] = latest = time
            there[sent[now[~late[now]]]] = True
            under_way = sent[now[late[now]]]
            position[ranks] = after[now]
        elif time - latest > patience:  # no slot of a whole tick was of use to anybody
            break
    if (times < 0).any():
        order(schedule)  # raises, with the ranks that are stuck
    return times
