"""How long orders take: what `simulate` says, but thousands of times.

Nothing is checked, except that the ranks do not wait for each other in a circle: then the time is
infinite. Letters as in `schedules.core.action`, C and codes as in `schedules.search.problem`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.clocks.slots import Pattern
from schedules.clocks.ticks import PATTERNS
from schedules.core.action import KINDS
from schedules.search.partners import among_partners
from schedules.search.problem import Orders, Problem


@dataclass(frozen=True, eq=False)
class Timer:
    """A clock for the orders of one problem.

    Attributes:
      problem: what is ordered.
      pattern: the slots of a lockstep tick; None for the event clock.
      waits: [width][C] how many slots after one of a tick the next comes that permits an action.
      partners: an exchange makes only those ranks meet that it joins, not all.
      delayed: it runs beside the work of the slot after its own.
    """

    problem: Problem
    pattern: str | None
    waits: list[list[int]]
    partners: bool = False
    delayed: bool = False

    def __call__(self, orders: Orders) -> tuple[float, Sequence[float]]:
        """The makespan, and [C] when each action starts: its time or, in lockstep, its slot."""
        if self.pattern is None:
            return _event(self.problem, orders)
        makespan, times = _lockstep(self.problem, orders, self.waits, self.delayed)
        if self.partners and makespan < math.inf:
            width = len(self.waits)
            makespan = among_partners(self.problem, orders, times, width, delayed=self.delayed)
        return makespan, times


def timers(
    problem: Problem, clock: str, *, partners: bool = False, delayed: bool | None = False
) -> list[Timer]:
    """One for the event clock; in lockstep, one for each pattern, without delays and with them.

    Where every exchange is a barrier and nothing is delayed, slots that differ from rank to rank
    seldom gain.
    """
    if clock == "event":
        return [Timer(problem, None, [])]
    return [
        Timer(problem, name, _waits(problem, pattern), partners, late)
        for late in ([False, True] if delayed is None else [delayed])
        for name, pattern in PATTERNS.items()
        if partners or late or all(len(slot) == 1 for slot in pattern)
    ]


def _waits(problem: Problem, pattern: Pattern) -> list[list[int]]:
    width, each = len(pattern), problem.num_microbatches

    def wait(slot: int, kind: str, rank: int) -> int:
        turns = [pattern[(slot + d) % width] for d in range(width)]
        return next(d for d, turn in enumerate(turns) if kind in turn[rank % len(turn)])

    return [
        [n for kind in KINDS for rank in problem.placement for n in [wait(slot, kind, rank)] * each]
        for slot in range(width)
    ]


def _event(problem: Problem, orders: Orders) -> tuple[float, list[float]]:
    durations, awaited, sent = problem.durations, problem.awaited, problem.sent
    lag, reader = problem.lag, problem.reader
    starts = [-1.0] * len(durations)
    arrival = [-1.0] * len(durations)
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    stuck: list[int] = [-1] * len(orders)  # the message that a rank waits for
    todo = list(range(len(orders)))
    while todo:
        rank = todo.pop()
        order, now = orders[rank], free[rank]
        n, size = position[rank], len(orders[rank])
        stuck[rank] = -1
        while n < size:
            code = order[n]
            message = awaited[code]
            if message >= 0:
                there = arrival[message]
                if there < 0.0:
                    stuck[rank] = message
                    break
                if there > now:  # noqa: PLR1730  max() takes as long as the rest
                    now = there
            starts[code] = now
            now += durations[code]
            message = sent[code]
            if message >= 0:
                arrival[message] = now + lag[code]
                to = reader[code]
                if stuck[to] == message:
                    todo.append(to)
            n += 1
        position[rank], free[rank] = n, now
    if any(n < len(order) for n, order in zip(position, orders, strict=True)):
        return math.inf, starts
    return max(free), starts


def _lockstep(
    problem: Problem, orders: Orders, waits: list[list[int]], delayed: bool
) -> tuple[float, list[int]]:
    durations, awaited, sent = problem.durations, problem.awaited, problem.sent
    lag, reader = problem.lag, problem.reader
    width = len(waits)
    times, usable = [-1] * len(awaited), [-1] * len(awaited)
    work: list[float] = []
    exchange = [0.0] * width
    position, free = [0] * len(orders), [0] * len(orders)
    stuck = [-1] * len(orders)  # the message that a rank waits for
    todo = list(range(len(orders)))
    while todo:
        rank = todo.pop()
        order, now = orders[rank], free[rank]
        n, size = position[rank], len(orders[rank])
        stuck[rank] = -1
        while n < size:
            code = order[n]
            message = awaited[code]
            if message >= 0:
                there = usable[message]
                if there < 0:
                    stuck[rank] = message
                    break
                if there > now:  # noqa: PLR1730  max() takes as long as the rest
                    now = there
            now += waits[now % width][code]
            times[code] = now
            while now >= len(work):
                work.append(0.0)
            if durations[code] > work[now]:  # noqa: PLR1730
                work[now] = durations[code]
            message = sent[code]
            if message >= 0:
                to = reader[code]
                late = delayed and to != rank
                if lag[code] > exchange[(now + late) % width]:  # noqa: PLR1730
                    exchange[(now + late) % width] = lag[code]
                usable[message] = now + 1 + late
                if stuck[to] == message:
                    todo.append(to)
            now += 1
            n += 1
        position[rank], free[rank] = n, now
    if any(n < len(order) for n, order in zip(position, orders, strict=True)):
        return math.inf, times
    return _among_all(work, exchange, delayed), times


def _among_all(work: list[float], exchange: list[float], delayed: bool) -> float:
    """The makespan where every exchange is a barrier; the last slot's is nobody's."""
    width, last = len(exchange), len(work) - 1
    if delayed:
        return (
            sum(max(one, exchange[slot % width]) for slot, one in enumerate(work[:-1])) + work[-1]
        )
    rounds, rest = divmod(len(work), width)
    return sum(work) + sum(exchange) * rounds + sum(exchange[:rest]) - exchange[last % width]
