"""ZB-auto: a split-backward timetable for given costs and a memory limit, one stage per rank.

The heuristic of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, with
its three yes-or-no choices; the best of the eight timetables is taken.

    idle on the critical rank   what the costs and the limit leave
    peak activations            at most the limit, if weight_memory = 1

The paper frees a part of an input's memory at its I, and the rest, weight_memory, at its W. In a
transformer with a heads, s tokens and h features, weight_memory is 32 / (34 + 5as / h). The paper's
figures for a limit of 2S need this. If all memory is held until W, as `check` counts, the last rank
can run at most 2S W after its last I. Then the first rank idles (S - 1)(F + I + 2 comm) - 2S W or
longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import is_number
from schedules.core.costs import Costs, Times, of_unit_length_by_default
from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import need_memory, need_stages_per_rank
from schedules.families.constructions.zb_plan import Choices, Plan


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    num_stages: int,
    *,
    costs: Costs | None = None,
    max_activations: float | None = None,
    weight_memory: float = 1.0,
) -> Schedule:
    """Build the best of the `variants`: that with the shortest span of a rank, as in the paper.

    If several variants have that span, the smallest makespan decides. For a step with a synchronous
    optimiser only the makespan counts: `auto` takes the best of the eight by makespan.

    Args:
      num_ranks: S.
      num_microbatches: M.
      num_stages: K, equal to S.
      costs: durations; by default F = I = W = 1 and messages are free.
      max_activations: the number of stage inputs that a rank may hold; 2S by default.
      weight_memory: the part of an input that is held from its I to its W; by default all of it, as
        `check` and `Report.peak_activations` count.

    Raises:
      ScheduleError: more than one stage per rank, a limit that no schedule can meet, or a
        weight_memory outside 0..1.
    """
    sizes = num_ranks, num_microbatches, num_stages
    plans = _plans(*sizes, costs, max_activations, weight_memory)
    best = min((plan for _, plan in plans), key=Plan.length)
    return best.schedule("zb_auto")


def variants(
    num_ranks: int,
    num_microbatches: int,
    num_stages: int,
    *,
    costs: Costs | None = None,
    max_activations: float | None = None,
) -> dict[str, Schedule]:
    """Build all eight variants by name, with all memory held until W; errors: see `zb_auto`."""
    plans = _plans(num_ranks, num_microbatches, num_stages, costs, max_activations)
    return {str(choices): plan.schedule(str(choices)) for choices, plan in plans}


def _plans(
    num_ranks: int,
    num_microbatches: int,
    num_stages: int,
    costs: Costs | None,
    max_activations: float | None,
    weight_memory: float = 1.0,
) -> Iterator[tuple[Choices, Plan]]:
    need_stages_per_rank("zb_auto", 1, num_ranks, num_stages)
    limit = 2 * num_ranks if max_activations is None else max_activations
    need_memory(limit, num_ranks, num_stages)
    if not (is_number(weight_memory) and 0 <= weight_memory <= 1):
        raise ScheduleError(
            f"weight_memory={shorten(weight_memory)}: is the part of a stage input's memory that "
            f"is held from I to W; give a number from 0 to 1"
        )
    costs = of_unit_length_by_default(costs)
    table, lag = _whole(costs.table(num_stages), costs.messages(num_ranks))
    for choices in itertools.starmap(Choices, itertools.product((False, True), repeat=3)):
        plan = Plan(num_microbatches, table, lag, limit, weight_memory, choices)
        plan.warm_up()
        for microbatch in range(num_microbatches):
            if microbatch:
                plan.forward()
            plan.backward()
        plan.flush()
        yield choices, plan


def _whole(*times: Times) -> Iterator[list[list[int]]]:
    """Express times in one unit in which all are whole, so that equal sums compare equal.

    Ratios to the longest time do not depend on the unit of the input. If they are fractions with a
    small common denominator, that denominator is exact; otherwise they keep 12 digits.
    """
    longest = max(float(one.max()) for one in times) or 1.0
    ratios = {float(ratio) for one in times for ratio in np.unique(one / longest)}
    parts = {ratio: Fraction(ratio).limit_denominator(10**5) for ratio in ratios}
    unit = math.lcm(*(part.denominator for part in parts.values()))
    if unit > 10**12 or any(abs(ratio - part) > 1e-14 for ratio, part in parts.items()):
        unit = 10**12
    return (np.rint(one / longest * unit).astype(np.int64).tolist() for one in times)
