"""When each action runs in lockstep: ticks of a few slots, every slot ended by an exchange.

All ranks meet at the end of a slot, so it lasts as long as the slowest action in it, and a
message sent in one slot can be used in the next. Letters as in `schedules.ir`.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.costs import Costs
from schedules.ir import Action, Schedule
from schedules.walk import Message, awaited, sent, walk

Pattern = tuple[str, ...]  # the kinds each slot of a tick may run

SINGLE: Pattern = ("FBIW",)
PAIRED: Pattern = ("F", "BIW")
PATTERNS: dict[str, Pattern] = {"single": SINGLE, "paired": PAIRED}


@dataclass(frozen=True)
class Ticks:
    """A schedule laid out in slots.

    Attributes:
      schedule: what was laid out; no rank's order has changed.
      pattern: the kinds each slot of a tick may run.
      times: [S] tuples, aligned with ``schedule.orders``: the time of each action, counted in
        slots; time t is slot ``t % len(pattern)`` of tick ``t // len(pattern)``.
    """

    schedule: Schedule
    pattern: Pattern
    times: tuple[tuple[int, ...], ...]

    @property
    def num_ticks(self) -> int:
        """T."""
        last = max((times[-1] for times in self.times if times), default=-1)
        return last // len(self.pattern) + 1


def lay_out(schedule: Schedule, pattern: Pattern) -> Ticks:
    """Run every action in the first slot that permits its kind and has its message."""
    width = len(pattern)
    # wait[kind][t % width] is how many slots after t the next one for this kind comes.
    wait = {
        kind: [
            next(d for d in range(width) if kind in pattern[(s + d) % width]) for s in range(width)
        ]
        for kind in "FBIW"
    }
    free = [0] * schedule.num_ranks
    usable: dict[Message, int] = {}
    times: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in walk(schedule):
        message = awaited(action, schedule.num_stages)
        start = free[rank] if message is None else max(free[rank], usable.pop(message))
        start += wait[action.kind][start % width]
        times[rank].append(start)
        free[rank] = start + 1
        released = sent(action, schedule.num_stages)
        if released is not None:
            usable[released] = start + 1
    return Ticks(schedule, pattern, tuple(map(tuple, times)))


def spans(ticks: Ticks, costs: Costs) -> list[tuple[float, float]]:
    """[T * slots] (start, end) of every slot: as long as its slowest action, then one exchange.

    A slot that no rank uses takes no time; an exchange is paid after every slot in which some
    rank sends to another.
    """
    schedule = ticks.schedule
    count = ticks.num_ticks * len(ticks.pattern)
    work, exchange = [0.0] * count, [0.0] * count
    for rank, (order, times) in enumerate(zip(schedule.orders, ticks.times, strict=True)):
        for action, time in zip(order, times, strict=True):
            work[time] = max(work[time], costs.of(action.kind))
            if crosses(schedule, rank, action):
                exchange[time] = costs.comm
    result, now = [], 0.0
    for busy, message in zip(work, exchange, strict=True):
        result.append((now, now + busy))
        now += busy + message
    return result


def makespan(ticks: Ticks, costs: Costs) -> float:
    """When the last slot ends."""
    return max((end for _, end in spans(ticks, costs)), default=0.0)


def crosses(schedule: Schedule, rank: int, action: Action) -> bool:
    """Whether the action's message leaves its rank."""
    message = sent(action, schedule.num_stages)
    if message is None:
        return False
    neighbour = message.stage - 1 if message.is_gradient else message.stage + 1
    return schedule.placement[neighbour] != rank
