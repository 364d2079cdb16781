"""A lower bound of the makespan that no timetable can beat.

Letters are those of `schedules.core.action`.
"""

from __future__ import annotations

from schedules.core.flat import F, I
from schedules.search.problem import Problem


def shortest(problem: Problem) -> float:
    """Compute a lower bound of a problem's makespan under any clock, which may be unreachable.

    It is the largest of these bounds. A rank starts after the first microbatch has reached it, and
    after its last I or B a gradient has to reach stage 0. One microbatch has to pass all stages and
    return. A microbatch is held until its gradient arrives, and a rank holds no more than the limit
    at once. If either B or I and W may run, the shorter counts.
    """
    num_stages, last = problem.num_stages, problem.num_stages - 1
    each, durations, lag = problem.num_microbatches, problem.durations, problem.lag
    code = [[problem.code(kind, stage, 0) for stage in range(num_stages)] for kind in range(4)]
    forward, whole, inputs, weights = ([durations[c] for c in row] for row in code)
    there, back = ([lag[c] for c in code[kind]] for kind in (F, I))
    both = [min(b, i + w) for b, i, w in zip(whole, inputs, weights, strict=True)]
    gradient = [min(b, i) for b, i in zip(whole, inputs, strict=True)]  # until it can be sent
    head, tail = [0.0], [both[0]]  # before a stage's first F, and from the start of its last I or B
    for k in range(last):
        head.append(head[-1] + forward[k] + there[k])
        after = back[k + 1] + tail[-1]
        halves = inputs[k + 1] + max(weights[k + 1], after)
        tail.append(min(halves, whole[k + 1] + after))
    waits = [0.0] * num_stages  # until a stage gets a microbatch's gradient, if nothing else runs
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
