"""Policies for `schedules.search.greedy`, the most frequent winners first.

Timetables of these policies and of `schedules.search.improve` win 62 to 69% of the comparisons
under a tight memory limit, and gain up to 22% in other cases, compared with families alone
(bench/notes/auto.md).

Letters are those of `schedules.core.action`, C and codes are those of `schedules.search.problem`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from schedules.core.flat import B, F, I
from schedules.search.greedy import Policy
from schedules.search.problem import Problem
from schedules.search.timing import Timer


def policies(timer: Timer) -> Iterator[tuple[str, Policy]]:
    """Yield names and policies for one placement and, in lockstep, one pattern.

    The policies combine three choices: F or backward first; the oldest microbatch first or, with V
    > 1, groups that pass chunk after chunk; and the number of F by which a rank may be ahead (that
    of 1F1B, that of ZB-H2, or up to the memory limit).
    """
    problem = timer.problem
    several = len(problem.stages_of[0]) > 1
    typed = timer.pattern in ("paired", "unit")  # a slot holds one kind of action on all ranks
    for grouped, (depth, ahead), forward in itertools.product(
        (False, True) if several else (False,),
        _depths(problem)[typed:],
        (True,) if typed else (True, False),
    ):
        urgency = _urgency(problem, forward_first=forward, grouped=grouped)
        words = ["forward first" if forward else "backward first"]
        words += ["grouped"] * grouped + [depth] * bool(depth)
        for more, options in _options(timer):
            policy = Policy(urgency, ahead, **options)  # type: ignore[arg-type]
            yield ", ".join((*words, *more)), policy


def _options(timer: Timer) -> Iterator[tuple[list[str], dict[str, object]]]:
    """Yield the further options that a clock allows, with the words for a policy's name."""
    problem, pattern = timer.problem, timer.pattern
    size = problem.num_stages * problem.num_microbatches
    split, whole = [False] * size, [True] * size
    if pattern is None:
        for patience in (1.0, 0.5, 0.0):
            words = [f"patience {patience}"] if patience else []
            yield words, {"whole": split, "patience": patience}
        if problem.prices_halves:
            each, drain = problem.num_microbatches, problem.num_ranks
            early = [item % each < each - drain for item in range(size)]
            yield ["whole"], {"whole": whole}
            yield ["whole but for the drain"], {"whole": early, "patience": 0.5}
    elif pattern in ("single", "partner"):
        for even in (False, True):
            yield ["even"] * even, {"whole": split, "even": even}
            yield ["even"] * even + ["whole"], {"whole": whole, "even": even}
    else:
        for quorum in (problem.num_ranks, 0):
            yield ["W together"] * bool(quorum), {"whole": split, "quorum": quorum}
        yield ["whole"], {"whole": whole}


def _depths(problem: Problem) -> list[tuple[str, Sequence[float]]]:
    """List names and values of the choices for [S] how many F each rank may be ahead."""
    ranks = range(problem.num_ranks, 0, -1)
    before = (len(problem.stages_of[0]) - 1) * problem.num_ranks
    return [
        ("ahead as 1f1b", [before + left for left in ranks]),
        ("ahead as zb_h2", [before + 2 * left - 1 for left in ranks]),
        ("", [math.inf] * problem.num_ranks),
    ]


def _urgency(problem: Problem, *, forward_first: bool, grouped: bool) -> list[float]:
    """Compute [C] the urgency of each action; the smallest is the most urgent, and W is last."""
    num_stages, each = problem.num_stages, problem.num_microbatches
    chunks, size = len(problem.stages_of[0]), num_stages * each
    group = min(problem.num_ranks, each) if grouped else 1
    chunk_of = {k: chunk for stages in problem.stages_of for chunk, k in enumerate(stages)}
    forward: list[float] = []
    backward: list[float] = []
    for stage in range(num_stages):
        for m in range(each):
            turn, place = divmod(m, group)
            if grouped:
                there, back = chunk_of[stage], chunks - 1 - chunk_of[stage]
            else:  # of one microbatch, the action that has passed more stages
                there, back = num_stages - 1 - stage, stage
            steps = chunks if grouped else num_stages
            forward.append((turn * steps + there) * group + place)
            backward.append((turn * steps + back) * group + place)
    late = {F: 0 if forward_first else size, B: size if forward_first else 0}
    late[I] = late[B]
    rows = {F: forward, B: backward, I: backward}
    urgency = [late[kind] + value for kind in (F, B, I) for value in rows[kind]]
    return urgency + [2.0 * size + value for value in backward]
