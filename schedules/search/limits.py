"""A lower bound of the makespan that no timetable can beat.

Letters as in `schedules.core.action`.
"""

from __future__ import annotations

from schedules.core.flat import F, I
from schedules.search.problem import Problem


def shortest(problem: Problem) -> float:
    """Compute a lower bound of a problem's makespan under any clock, not necessarily reachable.

    The first microbatch has to reach a rank before it starts, and after a rank's last I or B a
    gradient has to reach stage 0. One microbatch has to pass all stages and back: it is held
    meanwhile, and a rank holds no more than the limit at once. If B or I and W may both run, the
    shorter is counted.
    """
    num_stages, last = problem.num_stages, problem.num_stages - 1
    each, durations, lag = problem.num_microbatches, problem.durations, problem.lag
    code = [[problem.code(kind, stage, 0) for stage in range(num_stages)] for kind in range(4)]
    forward, whole, inputs, weights = ([durations[c] for c in row] for row in code)
    there, back = ([lag[c] for c in code[kind]] for kind in (F, I))
    both = [min(b, i + w) for b, i, w in zip(whole, inputs, weights, strict=True)]
    gradient = [min(b, i) for b, i in zip(whole, inputs, strict=True)]  # until it is sent
    head, tail = [0.0], [both[0]]  # before a stage's first F, from its last I or B on
    for k in range(last):
        head.append(head[-1] + forward[k] + there[k])
        after = back[k + 1] + tail[-1]
        halves = inputs[k + 1] + max(weights[k + 1], after)
        tail.append(min(halves, whole[k + 1] + after))
    waits = [0.0] * num_stages  # until a stage has a microbatch's gradient, if nothing else runs
    waits[last] = forward[last]
    for k in reversed(range(last)):
        waits[k] = forward[k] + there[k] + waits[k + 1] + gradient[k + 1] + back[k + 1]
    bounds = [head[last] + waits[last] + tail[last]]
    for stages in problem.stages_of:
        start = min(head[k] for k in stages)
        passes = each * sum(forward[k] + gradient[k] for k in stages)
        storage = each * sum(waits[k] + both[k] for k in stages) / problem.limit
        bounds += [
            start + each * sum(forward[k] + both[k] for k in stages),
            start + passes + min(tail[k] - gradient[k] for k in stages),
            start + storage,
        ]
    return max(bounds)
