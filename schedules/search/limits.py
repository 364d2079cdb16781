"""What no timetable can beat: the shortest makespan.

Letters as in `schedules.core.action`.
"""

from __future__ import annotations

from schedules.core.flat import F, I, W
from schedules.search.problem import Problem


def shortest(problem: Problem) -> float:
    """A makespan that no timetable of a problem beats, under any clock; none need reach it.

    The first microbatch has to reach a rank before it starts, and after a rank's last I a gradient
    has to reach stage 0. One microbatch has to pass all stages and back: on its way it is held,
    and a rank holds no more than the limit at once.
    """
    num_stages, last = problem.num_stages, problem.num_stages - 1
    each, durations, lag = problem.num_microbatches, problem.durations, problem.lag
    code = [[problem.code(kind, stage, 0) for stage in range(num_stages)] for kind in range(4)]
    forward, inputs, weights = ([durations[c] for c in code[kind]] for kind in (F, I, W))
    there, back = ([lag[c] for c in code[kind]] for kind in (F, I))
    head, tail = [0.0], [weights[0]]  # before a stage's first F, after its last I
    for k in range(last):
        head.append(head[-1] + forward[k] + there[k])
        tail.append(max(weights[k + 1], back[k + 1] + inputs[k] + tail[-1]))
    held = [0.0] * num_stages  # how long a stage holds a microbatch, if nothing else runs
    held[last] = forward[last] + inputs[last]
    for k in reversed(range(last)):
        held[k] = forward[k] + there[k] + held[k + 1] + back[k + 1] + inputs[k]
    bounds = [head[last] + held[last] + tail[last]]
    for stages in problem.stages_of:
        start = min(head[k] for k in stages)
        passes = each * sum(forward[k] + inputs[k] for k in stages)
        storage = each * sum(held[k] + weights[k] for k in stages) / problem.limit
        bounds += [
            start + passes + each * sum(weights[k] for k in stages),
            start + passes + min(tail[k] for k in stages),
            start + storage,
        ]
    return max(bounds)
