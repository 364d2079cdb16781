"""The order in which messages let actions run: one walk, shared by every clock and by lowering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schedules.ir import BACKWARD, Action, Schedule, ScheduleError


class Message(NamedTuple):
    """What an action sends: the output of ``stage``, or the gradient for its input."""

    stage: int
    is_gradient: bool
    microbatch: int


def awaited(action: Action, num_stages: int) -> Message | None:
    """The message an action cannot start without; None if it needs only its own rank's work."""
    stage, kind, microbatch = action
    if kind == "F":
        return Message(stage - 1, False, microbatch) if stage > 0 else None
    if kind in BACKWARD and stage < num_stages - 1:
        return Message(stage + 1, True, microbatch)
    return None


def sent(action: Action, num_stages: int) -> Message | None:
    """The message that an action's end releases; None if nobody waits for it."""
    stage, kind, microbatch = action
    if kind == "F":
        return Message(stage, False, microbatch) if stage < num_stages - 1 else None
    if kind in BACKWARD and stage > 0:
        return Message(stage, True, microbatch)
    return None


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action), each rank in its order and no action before what it waits for.

    Raises:
      ScheduleError: the ranks wait for each other in a circle (`check` shows which).
    """
    num_stages = schedule.num_stages
    position = [0] * schedule.num_ranks
    done: set[Message] = set()
    waiting: dict[Message, int] = {}
    ready = list(reversed(range(schedule.num_ranks)))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            message = awaited(action, num_stages)
            if message is not None and message not in done:
                waiting[message] = rank
                break
            yield rank, action
            position[rank] += 1
            released = sent(action, num_stages)
            if released is not None:
                done.add(released)
                woken = waiting.pop(released, None)
                if woken is not None:
                    ready.append(woken)
    stuck = {
        r: schedule.orders[r][n] for r, n in enumerate(position) if n < len(schedule.orders[r])
    }
    if stuck:
        where = ", ".join(f"rank {r} at {action}" for r, action in stuck.items())
        raise ScheduleError(
            f"schedule {schedule.name!r} deadlocks: {where}; "
            f"schedules.check(schedule) shows the grid and the culprit"
        )
