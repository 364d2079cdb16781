"""The order in which messages let actions run: one walk, shared by the ticks and by lowering.

Letters as in `schedules.core.action`, A as in `schedules.core.flat`. A message has a number: twice
the position of its (stage, microbatch) for the output of a stage, one more for the gradient for its
input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.core.action import ScheduleError
from schedules.core.flat import F, Ints, Mask, W, flatten, once
from schedules.core.timetable import Timetable


class Walk(NamedTuple):
    """How actions follow each other.

    Attributes:
      awaited: [A] the message that an action cannot start without, -1 for none.
      sent: [A] the message that its end releases, -1 for none.
      target: [A] the rank that reads what it sends, its own if it sends nothing.
      crosses: [A] whether that is another rank.
    """

    awaited: Ints
    sent: Ints
    target: Ints
    crosses: Mask


@once
def follow(schedule: Timetable) -> Walk:
    """Number the messages of a schedule."""
    flat = flatten(schedule)
    last = schedule.num_stages - 1
    item = flat.stage * schedule.num_microbatches + flat.microbatch
    is_forward, is_weights = flat.kind == F, flat.kind == W
    step = np.where(is_forward, 1, -1)  # towards the stage that reads what is sent
    reader, writer = flat.stage + step, flat.stage - step
    sends = ~is_weights & (reader >= 0) & (reader <= last)
    waits = ~is_weights & (writer >= 0) & (writer <= last)
    code = 2 * item + ~is_forward
    sent = np.where(sends, code, -1)
    awaited = np.where(waits, code - 2 * step * schedule.num_microbatches, -1)
    placement = np.array(schedule.placement, np.int64)
    target = np.where(sends, placement[np.clip(reader, 0, last)], flat.rank)
    return Walk(awaited, sent, target, target != flat.rank)


@once
def order(schedule: Timetable) -> Ints:
    """[A] indices of the actions: each rank's in its order, none before what it waits for.

    Raises:
      ScheduleError: the ranks wait for each other in a circle (`check` shows which).
    """
    path, first = follow(schedule), flatten(schedule).first.tolist()
    awaited, sent = path.awaited.tolist(), path.sent.tolist()
    position = first[:-1]
    done = bytearray(2 * schedule.num_stages * schedule.num_microbatches)
    waiting: dict[int, int] = {}
    found: list[int] = []
    ready = list(reversed(range(schedule.num_ranks)))
    while ready:
        rank = ready.pop()
        start, end = position[rank], first[rank + 1]
        for n in range(start, end):
            message = awaited[n]
            if message >= 0 and not done[message]:
                waiting[message] = rank
                position[rank] = n
                break
            message = sent[n]
            if message >= 0:
                done[message] = 1
                if message in waiting:
                    ready.append(waiting.pop(message))
        else:
            position[rank] = end
        found.extend(range(start, position[rank]))
    stuck = {r: n for r, n in enumerate(position) if n < first[r + 1]}
    if stuck:
        where = ", ".join(
            f"rank {r} at {schedule.orders[r][n - first[r]]}" for r, n in stuck.items()
        )
        raise ScheduleError(
            f"schedule {schedule.name!r} deadlocks: {where}; "
            f"schedules.check(schedule) shows the grid and the culprit"
        )
    return np.array(found, np.int64)
