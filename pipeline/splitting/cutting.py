"""The places to cut a row of calls: given by the user, or chosen to balance the stages.

Letters: K stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pipeline.splitting.layouts import parse_layout
from pipeline.splitting.placing import costs_of_calls
from pipeline.splitting.recording import BlockGroup
from pipeline.splitting.tracing import Trace


def choose_counts(
    trace: Trace, num_stages: int, cut: Any, costs: Any, groups: Sequence[BlockGroup]
) -> tuple[int, ...]:
    """Return [K] the number of calls of each stage."""
    number = len(trace.calls)
    what = ", ".join(repr(group.name) for group in groups)
    if cut is not None and costs is not None:
        raise ValueError("cut= and costs= are both given: costs are there to choose a cut")
    is_list = isinstance(cut, list | tuple)
    if isinstance(cut, str) or (is_list and any(isinstance(s, list | tuple) for s in cut)):
        cut = parse_layout(cut, number)
    if cut is not None:
        counts = tuple(cut)
        if len(counts) != num_stages or sum(counts) != number or min(counts) < 0:
            raise ValueError(
                f"cut={list(counts)}: must be {num_stages} numbers, which add up to the {number} "
                f"calls of {what}"
            )
        return counts
    if number < num_stages:
        raise ValueError(
            f"num_stages={num_stages}, and the model calls {number} blocks of {what}: ask for "
            f"fewer stages, or give a cut= in which some have none"
        )
    counted, before, behind = costs_of_calls(trace)
    if costs is not None:
        given = [float(cost) for cost in costs]
        if len(given) != number or min(given) < 0:
            raise ValueError(
                f"costs= has {len(given)} numbers: must be {number}, none below 0, one for each "
                f"call of {what}"
            )
        scale = sum(counted) / sum(given) if sum(given) else 1.0
        counted = [cost * scale for cost in given]
    return balance(counted, num_stages, before, behind)


def balance(
    costs: Sequence[float], num_stages: int, before: float = 0.0, behind: float = 0.0
) -> tuple[int, ...]:
    """Return [K] the numbers of consecutive costs per stage that make the costliest stage cheapest.

    Among such cuts the cut with the least sum of squared stage costs is taken. Each stage gets at
    least one cost. The first stage has the cost ``before`` too, and the last the cost ``behind``.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    n, none = len(costs), (float("inf"), float("inf"), ())
    best: list[Any] = [none] * (n + 1)
    best[0] = 0.0, 0.0, ()
    for k in range(num_stages):
        now: list[Any] = [none] * (n + 1)
        beside = before * (k == 0) + behind * (k == num_stages - 1)
        for stop in range(k + 1, n + 1):
            for start in range(k, stop):
                worst, squares, counts = best[start]
                own = sums[stop] - sums[start] + beside
                found = max(worst, own), squares + own * own, (*counts, stop - start)
                if found[:2] < now[stop][:2]:
                    now[stop] = found
        best = now
    return tuple(best[n][2])
