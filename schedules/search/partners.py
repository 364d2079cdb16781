"""The lockstep clock where exchanges make only those ranks meet that they join, for a search.

It says what `schedules.clocks.lockstep` does, of plain lists. Letters as in
`schedules.core.action`, C and codes as in `schedules.search.problem`.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.search.problem import Orders, Problem


def among_partners(
    problem: Problem, orders: Orders, times: Sequence[int], width: int, *, delayed: bool
) -> float:
    """The makespan of orders.

    Args:
      problem: what is ordered.
      orders: [S] codes.
      times: [C] the slot of each action.
      width: slots per tick.
      delayed: exchanges run beside the work of the slot after their own.
    """
    durations, num_ranks = problem.durations, problem.num_ranks
    meets, pays = _exchanges(problem, orders, times, width, delayed=delayed)
    count = 1 + max(times[code] for order in orders for code in order)
    work = [[0.0] * num_ranks for _ in range(count)]
    last = [0] * num_ranks  # slot in which each rank works
    for rank, order in enumerate(orders):
        for code in order:
            work[times[code]][rank] = durations[code]
        last[rank] = times[order[-1]]
    begins, makespan, ranks = [0.0] * num_ranks, 0.0, range(num_ranks)
    for time, row in enumerate(work):
        slot = time % width
        ended = [begin + length for begin, length in zip(begins, row, strict=True)]
        makespan = max(makespan, *(ended[rank] for rank in ranks if last[rank] == time), 0.0)
        met = begins if delayed else ended
        begins = [
            max(ended[rank], max([met[other] for other in meets[slot][rank]]) + pays[slot][rank])
            for rank in ranks
        ]
    return makespan


def _exchanges(
    problem: Problem, orders: Orders, times: Sequence[int], width: int, *, delayed: bool
) -> tuple[list[list[set[int]]], list[list[float]]]:
    """[width][S] whom each rank meets in a slot, itself too, and how long its exchange takes."""
    num_ranks = problem.num_ranks
    meets = [[{rank} for rank in range(num_ranks)] for _ in range(width)]
    pays = [[0.0] * num_ranks for _ in range(width)]
    for rank, order in enumerate(orders):
        for code in order:
            to = problem.reader[code]
            if to < 0 or to == rank:
                continue
            slot = (times[code] + delayed) % width
            for one, other in ((rank, to), (to, rank)):
                meets[slot][one].add(other)
                pays[slot][one] = max(pays[slot][one], problem.lag[code])
    return meets, pays
