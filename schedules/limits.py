"""What no timetable can beat: the smallest memory limit, and the shortest makespan.

Letters as in `schedules.ir`.
"""

from __future__ import annotations

import math

from schedules.flat import F, I, W
from schedules.ir import ScheduleError
from schedules.problem import Problem


def need_memory(memory_limit: object, num_ranks: int, num_stages: int) -> None:
    """See that some timetable meets a limit of stage inputs per rank.

    One microbatch has to pass all stages before its first gradient, so a rank holds V inputs at
    once; and V are enough on any placement, one microbatch after the other.

    Raises:
      ScheduleError: no number, or under V.
    """
    if (
        isinstance(memory_limit, bool)
        or not isinstance(memory_limit, int | float)
        or math.isnan(memory_limit)
    ):
        raise ScheduleError(
            f"memory_limit={memory_limit!r}: must be a number of stage inputs per rank, or None; "
            f"give how many fit into a rank's memory"
        )
    least = num_stages // num_ranks
    if memory_limit < least:
        raise ScheduleError(
            f"memory_limit={memory_limit!r} with num_ranks={num_ranks} and "
            f"num_stages={num_stages}: a microbatch passes all {least} stages of a rank before its "
            f"first gradient, so no schedule holds fewer than {least} stage inputs; use "
            f"memory_limit={least} or more"
        )


def shortest(problem: Problem) -> float:
    """A makespan that no timetable of a problem beats, under any clock; none need reach it.

    The first microbatch has to reach a rank before it starts; after the last I of a rank a
    gradient has to reach stage 0; and a single microbatch passes all stages and back.
    """
    last = problem.num_stages - 1
    first = [problem.code(kind, 0, 0) for kind in range(4)]
    each, durations, lag = problem.num_microbatches, problem.durations, problem.lag

    def takes(kind: int, stage: int) -> float:
        return durations[first[kind] + stage * each]

    head, tail = [0.0], [takes(W, 0)]  # before a stage's first F, after its last I
    for stage in range(last):
        head.append(head[-1] + takes(F, stage) + lag[first[F] + stage * each])
        way = lag[first[I] + (stage + 1) * each] + takes(I, stage)
        tail.append(max(takes(W, stage + 1), way + tail[-1]))
    bounds = [head[last] + takes(F, last) + takes(I, last) + tail[last]]
    for stages in problem.stages_of:
        start = min(head[k] for k in stages)
        passes = each * sum(takes(F, k) + takes(I, k) for k in stages)
        weights = each * sum(takes(W, k) for k in stages)
        bounds += [start + passes + weights, start + passes + min(tail[k] for k in stages)]
    return max(bounds)
