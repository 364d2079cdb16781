"""Local improvement of orders: move, swap, retime; and merge or split, if that changes the work.

The method is simulated annealing: at first a change may be kept even if it makes a timetable a
little slower, at the end never. The best timetable of the search is returned. C is the number of
codes of actions (`schedules.search.problem`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from schedules.core.flat import B, F, I, W
from schedules.search.greedy import Policy, run
from schedules.search.merge import joined
from schedules.search.problem import Orders, Problem, peak
from schedules.search.timing import Timer

_RETIMES = 0.02  # the share of trials that reorder all actions, which takes as long as ten moves
_SWAPS = 0.3  # the share of the other trials that swap similar neighbours at many places
_TURNS = 0.1  # the share of trials that merge or split a backward, if B and its halves differ
_REACH = (1, 1, 2, 3, 5, 8)  # the number of places by which an action moves
_HEAT = 0.002  # the part of the makespan by which a trial may be slower at the start


def improve(
    timer: Timer, orders: Orders, *, budget: int, floor: float, rng: random.Random
) -> tuple[float, Orders]:
    """Search near some orders; return the makespan and the orders of the best timetable.

    It times at most ``budget`` timetables, and stops at a makespan of ``floor``.
    """
    size = timer.problem.num_stages * timer.problem.num_microbatches
    prices_halves = timer.problem.prices_halves
    least, times = timer(orders)
    best, now, current = orders, least, orders
    for step in range(budget):
        if least <= floor:
            break
        if rng.random() < _RETIMES:
            kinds = {code for order in current for code in order if code // size == B}
            whole = [B * size + item in kinds for item in range(size)]
            trial: Orders | None = _retime(timer, times, whole, rng)
        elif prices_halves and rng.random() < _TURNS:
            trial = _turn(timer.problem, current, rng)
        else:
            change = _swap if rng.random() < _SWAPS else _move
            trial = change(timer.problem, current, rng)
        if trial is None:
            continue
        makespan, begun = timer(trial)
        heat = _HEAT * least * (1 - step / budget)
        if makespan <= now or (heat and rng.random() < math.exp((now - makespan) / heat)):
            current, now, times = trial, makespan, begun
            if now < least * (1 - 1e-9):
                best, least = current, now
    return least, best


def _move(problem: Problem, orders: Orders, rng: random.Random) -> Orders | None:
    """Move an action in its rank's order; return None if the order or memory forbids the move."""
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
        if neighbour == item or (_in_turn(kind, other) and neighbour // each == item // each):
            break
        to += step
    if to == start:
        return None
    changed = [*order[:start], *order[start + 1 :]]
    changed.insert(to, code)
    return _with(problem, orders, rank, changed)


def _swap(problem: Problem, orders: Orders, rng: random.Random) -> Orders | None:
    """Swap two neighbours of a rank, and further neighbours of the same kinds and stages."""
    each, size = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    rank = rng.randrange(len(orders))
    changed = list(orders[rank])
    start, last = rng.randrange(len(changed) - 1), len(changed) - 1
    first, second = changed[start] // each, changed[start + 1] // each
    kinds = first // problem.num_stages, second // problem.num_stages
    if (first - second) % problem.num_stages == 0 and _in_turn(*kinds):
        return None
    n, end = rng.choice(((0, start + 1), (start, last), (0, last)))
    while n < end:
        code, other = changed[n], changed[n + 1]
        if code // each == first and other // each == second and code % size != other % size:
            changed[n], changed[n + 1] = other, code
            n += 1
        n += 1
    return _with(problem, orders, rank, changed)


def _turn(problem: Problem, orders: Orders, rng: random.Random) -> Orders | None:
    """Replace one I and its W by B; or B by I and, some places later, its W."""
    each, size = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    rank = rng.randrange(len(orders))
    order = orders[rank]
    start = rng.randrange(len(order))
    kind, item = divmod(order[start], size)
    if kind == I:
        changed = joined(problem, order, {item})
    elif kind == B:
        to = start + 1
        for _ in range(rng.choice((0, *_REACH))):
            other, neighbour = divmod(order[to], size) if to < len(order) else (B, item)
            if _in_turn(W, other) and neighbour // each == item // each:
                break
            to += 1
        halves = I * size + item, W * size + item
        changed = [*order[:start], halves[0], *order[start + 1 : to], halves[1], *order[to:]]
    else:
        return None
    return _with(problem, orders, rank, changed)


def _in_turn(kind: int, other: int) -> bool:
    """Tell whether a stage must run both kinds in microbatch order, for gradients and sums."""
    return kind == other or {kind, other} in ({B, I}, {B, W})


def _with(problem: Problem, orders: Orders, rank: int, changed: list[int]) -> Orders | None:
    """Replace one rank's order; return None if the new order exceeds the limit."""
    if math.isfinite(problem.limit) and peak(problem, changed) > problem.limit:
        return None
    result = list(orders)
    result[rank] = changed
    return result


def _retime(
    timer: Timer, times: Sequence[float], whole: Sequence[bool], rng: random.Random
) -> Orders:
    """Schedule all actions again by priority of their start; shift some starts of one stage."""
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
