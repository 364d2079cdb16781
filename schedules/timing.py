"""How long orders take: what `simulate` says, but thousands of times.

Nothing is checked, except that the ranks do not wait for each other in a circle: then the time is
infinite. Letters as in `schedules.ir`, C and codes as in `schedules.problem`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.ir import KINDS
from schedules.problem import Orders, Problem
from schedules.ticks import PATTERNS


@dataclass(frozen=True, eq=False)
class Timer:
    """A clock for the orders of one problem.

    Attributes:
      problem: what is ordered.
      pattern: the slots of a lockstep tick; None for the event clock.
      waits: [width][C] how many slots after one of a tick the next comes that permits an action.
    """

    problem: Problem
    pattern: str | None
    waits: list[list[int]]

    def __call__(self, orders: Orders) -> tuple[float, Sequence[float]]:
        """The makespan, and [C] when each action starts: its time or, in lockstep, its slot."""
        if self.pattern is None:
            return _event(self.problem, orders)
        return _lockstep(self.problem, orders, self.waits)


def timers(problem: Problem, clock: str) -> list[Timer]:
    """One for the event clock; in lockstep, one for each pattern that is the same on all ranks."""
    if clock == "event":
        return [Timer(problem, None, [])]
    return [
        Timer(problem, name, _waits(problem, [kinds for (kinds,) in pattern]))
        for name, pattern in PATTERNS.items()
        if all(len(slot) == 1 for slot in pattern)
    ]


def _waits(problem: Problem, permits: Sequence[str]) -> list[list[int]]:
    width, each = len(permits), problem.num_stages * problem.num_microbatches
    return [
        [
            wait
            for kind in KINDS
            for wait in [next(d for d in range(width) if kind in permits[(s + d) % width])] * each
        ]
        for s in range(width)
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


def _lockstep(problem: Problem, orders: Orders, waits: list[list[int]]) -> tuple[float, list[int]]:
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
                if lag[code] > exchange[now % width]:  # noqa: PLR1730
                    exchange[now % width] = lag[code]
                usable[message] = now + 1
                to = reader[code]
                if stuck[to] == message:
                    todo.append(to)
            now += 1
            n += 1
        position[rank], free[rank] = n, now
    if any(n < len(order) for n, order in zip(position, orders, strict=True)):
        return math.inf, times
    rounds, rest = divmod(len(work), width)
    paid = sum(exchange) * rounds + sum(exchange[:rest])
    return sum(work) + paid - exchange[(len(work) - 1) % width], times
