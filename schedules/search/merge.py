"""Merging of split backwards: I and its W become one B wherever that loses no time.

Halves can fill time in which a rank would wait, but take longer than a whole backward (`Costs.b`).
A W that fills no such time is better merged into its B. B takes the position of I, so no input is
held longer than before, and I keeps no values for W. Each stage still sums its microbatches in
ascending order: W of earlier microbatches that have not run come just before the B.

`schedules.search.problem` explains the codes of actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from schedules.clocks.simulate import simulate
from schedules.core.costs import Costs, of_unit_length_by_default
from schedules.core.flat import B, I, W
from schedules.core.schedule import Schedule
from schedules.search.problem import Orders, Problem, pose
from schedules.search.timing import Timer

_SLACK = 1 + 1e-9  # the tolerance, so that rounding errors do not prevent a merge
_PARTS = 8  # divisions of the microbatches; trials merge the first 1, 2, ... of them at once
_WORK = 8_000_000  # the number of actions to time for one of the results: a few seconds


def merge(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Merge halves of backwards; under the event clock the result is never slower.

    No rank holds more than before, neither inputs nor the values that I keeps for W.

    Args:
      schedule: a legal schedule.
      costs: durations, with the duration of a whole backward; by default F = I = W = 1 and B = 2.
    """
    costs = of_unit_length_by_default(costs)
    sizes = schedule.num_ranks, schedule.num_microbatches
    problem = pose(schedule.placement, *sizes, costs, math.inf)
    orders = problem.encode(schedule)
    opening = {
        orders[rank][position] for rank, row in enumerate(schedule.pairs) for position in row
    }

    def rebuilt(codes: Orders) -> Schedule:
        pairs = tuple(tuple(n for n, c in enumerate(order) if c in opening) for order in codes)
        return replace(problem.decode(f"{schedule.name}, merged", codes), pairs=pairs)

    timer = Timer(problem, None, [])
    if opening and costs.pair is not None:  # the timers of a search do not overlap pairs
        codes = merged(
            problem,
            orders,
            lambda trial: simulate(rebuilt(trial), costs).makespan,
            starts=timer(orders)[1],
            opening=opening,
        )
    else:
        codes = merged_under(timer, orders, opening)
    return rebuilt(codes)


def merged_under(timer: Timer, orders: Orders, opening: Collection[int] = ()) -> Orders:
    """Merge halves in orders, as `merged`; the result is never slower under the timer's clock."""
    makespan, starts = timer(orders)
    if makespan == math.inf:
        return orders
    return merged(
        timer.problem, orders, lambda trial: timer(trial)[0], starts=starts, opening=opening
    )


def merged(
    problem: Problem,
    orders: Orders,
    length: Callable[[Orders], float],
    *,
    starts: Sequence[float],
    opening: Collection[int] = (),
) -> Orders:
    """Merge halves in three ways and return the shortest of the results.

    Backwards are merged one by one in order of time, or microbatch by microbatch, and the latter
    also after all backwards of the first microbatches at once. One merge alone may make other ranks
    wait, while all together may not. ``length`` gives the makespan of orders, ``starts`` [C] has
    the start of each action, and ``opening`` the codes of the F that open an overlapped pair.
    """
    each, size = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    split = [code - I * size for order in orders for code in order if code // size == I]
    as_time_goes = sorted(split, key=lambda item: starts[I * size + item])
    # Stage 0 gets a microbatch's gradient last, and no rank waits for its backward.
    by_microbatch = sorted(split, key=lambda item: (item % each, -starts[I * size + item]))
    results = [
        _one_by_one(problem, orders, length, as_time_goes, opening),
        _one_by_one(problem, orders, length, by_microbatch, opening),
    ]
    parts = [each * n // _PARTS for n in range(1, _PARTS + 1)]
    heads = [_joined(problem, orders, [n for n in split if n % each < m], opening) for m in parts]
    makespan, part = min((length(head), n) for n, head in enumerate(heads))
    if makespan < length(orders):
        rest = [item for item in by_microbatch if item % each >= parts[part]]
        results.append(_one_by_one(problem, heads[part], length, rest, opening))
    return min(results, key=lambda pair: pair[0])[1]


def _one_by_one(
    problem: Problem,
    orders: Orders,
    length: Callable[[Orders], float],
    items: Sequence[int],
    opening: Collection[int],
) -> tuple[float, Orders]:
    """Try to merge every item in turn; return the makespan and the orders.

    After a number of successes equal to the number of stages, as in a steady state, that many items
    are tried at once.
    """
    least, many = length(orders), problem.num_stages
    n = luck = 0
    for _ in range(_WORK // sum(map(len, orders))):
        if n >= len(items):
            break
        step = many if luck >= many else 1
        trial = _joined(problem, orders, items[n : n + step], opening)
        makespan = length(trial)
        if makespan <= least * _SLACK:
            orders, least = trial, min(makespan, least)
            n, luck = n + step, luck + step
        else:
            n, luck = n + (step == 1), 0
    return least, orders


def _joined(
    problem: Problem, orders: Orders, items: Iterable[int], opening: Collection[int]
) -> list[Sequence[int]]:
    """Replace I and W by B for these items (stage * M + microbatch), in every rank's order."""
    by_rank: dict[int, set[int]] = {}
    for item in items:
        by_rank.setdefault(problem.placement[item // problem.num_microbatches], set()).add(item)
    result = list(orders)
    for rank, wanted in by_rank.items():
        result[rank] = joined(problem, orders[rank], wanted, opening)
    return result


def joined(
    problem: Problem, order: Sequence[int], wanted: Collection[int], opening: Collection[int] = ()
) -> list[int]:
    """Replace I and W by B for these items in one rank's order."""
    each, size = problem.num_microbatches, problem.num_stages * problem.num_microbatches
    owed: dict[int, list[int]] = {}  # stage -> codes of the W that have yet to run
    early: set[int] = set()
    codes: list[int] = []
    for code in order:
        kind, item = divmod(code, size)
        if kind == I and item in wanted:
            before = owed.pop(item // each, [])
            early.update(before)
            at = len(codes) - (bool(codes) and codes[-1] in opening)
            codes[at:at] = before
            early.add(W * size + item)
            codes.append(B * size + item)
        elif code not in early:
            if kind == I:
                owed.setdefault(item // each, []).append(W * size + item)
            elif kind == W:
                owed[item // each].remove(code)
            codes.append(code)
    return codes
