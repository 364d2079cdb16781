"""Local improvement of orders: move or swap actions of a rank, or run them again by their times.

A change is kept if it makes nothing slower, so that the search wanders over plateaus; what it
returns is the best it met. Letters as in `schedules.ir`, C and codes as in `schedules.problem`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from schedules.flat import B, F, I, W
from schedules.greedy import Policy, run
from schedules.problem import Orders, Problem
from schedules.timing import Timer

_RETIMES = 0.1  # of all trials: one costs as much as ten moves
_REACH = (1, 1, 2, 3, 5, 8)  # how many places an action moves; 1 swaps two


def improve(
    timer: Timer, orders: Orders, *, budget: int, floor: float, rng: random.Random
) -> tuple[float, Orders]:
    """The makespan and the orders of the best timetable found; the given one if none is better.

    Args:
      timer: the clock.
      orders: a start, within the problem's limit.
      budget: how many timetables to time.
      floor: a makespan at which to stop.
      rng: where chance comes from.
    """
    size = timer.problem.num_stages * timer.problem.num_microbatches
    kinds = {code for order in orders for code in order if code // size == B}
    whole = [B * size + item in kinds for item in range(size)]
    least, times = timer(orders)
    best, now, current = orders, least, orders
    for _ in range(budget):
        if least <= floor:
            break
        trial = (
            _retime(timer, times, whole, rng)
            if rng.random() < _RETIMES
            else _move(timer.problem, current, rng)
        )
        if trial is None:
            continue
        makespan, begun = timer(trial)
        if makespan <= now * (1 + 1e-12):
            current, now, times = trial, makespan, begun
            if now < least * (1 - 1e-9):
                best, least = current, now
    return least, best


def _move(problem: Problem, orders: Orders, rng: random.Random) -> Orders | None:
    """One action of a rank some places earlier or later; None if its order or memory forbids it."""
    each, size = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    rank = rng.randrange(len(orders))
    order = orders[rank]
    start = rng.randrange(len(order))
    code = order[start]
    kind, item = divmod(code, size)
    reach = rng.choice(_REACH)
    step = rng.choice((-1, 1))
    to = start
    while abs(to - start) < reach and 0 <= to + step < len(order):
        other, neighbour = divmod(order[to + step], size)
        same_turn = other == kind or {other, kind} == {B, W}  # both run in ascending order
        if neighbour == item or (same_turn and neighbour // each == item // each):
            break
        to += step
    if to == start:
        return None
    changed = [*order[:start], *order[start + 1 :]]
    changed.insert(to, code)
    if not _fits(problem, changed):
        return None
    result = list(orders)
    result[rank] = changed
    return result


def _fits(problem: Problem, order: Sequence[int]) -> bool:
    """Whether a rank's order stays within the limit."""
    size, limit = problem.num_stages * problem.num_microbatches, problem.limit
    held = 0
    for code in order:
        kind = code // size
        if kind == F:
            held += 1
            if held > limit:
                return False
        elif kind != I:
            held -= 1
    return True


def _retime(
    timer: Timer, times: Sequence[float], whole: Sequence[bool], rng: random.Random
) -> Orders:
    """All actions again, urgent as they were early, but some of a stage earlier or later."""
    problem = timer.problem
    each = problem.num_microbatches
    urgency = list(times)
    first = problem.code(rng.choice((F, B, I, W)), rng.randrange(problem.num_stages), 0)
    begin = rng.randrange(each) if rng.random() < 0.5 else 0
    end = rng.randint(begin + 1, each) if rng.random() < 0.5 else each
    shift = rng.uniform(-1, 1) * rng.choice((0.5, 1, 2, 4)) * max(times) / each
    for code in range(first + begin, first + end):
        urgency[code] += shift
    policy = Policy(
        urgency,
        [math.inf] * problem.num_ranks,
        whole,
        patience=rng.choice((0.0, 0.5, 1.0)),
        even=rng.random() < 0.5,
    )
    return run(timer, policy)
