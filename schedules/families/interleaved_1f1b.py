"""Interleaved 1F1B: each rank holds V stages and alternates between them, for a shorter warm-up.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, arXiv:2104.04473; ``torch.distributed.pipelining`` has the same rule for M. F and B are the
durations for one stage, which has 1/V of a rank's layers.

    idle on the critical rank   (S - 1)(F + B) if M >= S,
                                else (S - 1 + (V - 1)(S - M))(F + B)
    peak activations            min(2(S - 1 - r) + (V - 1) g + 1, M V)

g = M / max(1, M // S) is the number of microbatches that run through a chunk before the next chunk
begins: S, if S divides M.

In addition to the (V - 1) g of the chunks, the warm-up has 2(S - 1 - r) forward passes, as in
Megatron. This is the eager warm-up: in paired ticks F and B share every tick, as in `eager_1f1b`.
Lockstep then costs nothing: at S = 8, M = 32, V = 2 and F = I = W, efficiency is .901 in paired
ticks, equal to the event clock, and .716 with one action per tick.

With ``group=g``, S / 2 <= g <= S, M makes n = M / g rounds: the generalized interleaved schedule
(GIS) of Wan et al., "PipeOffload", 2025, arXiv:2503.01328, with whole backwards.

    idle on the critical rank   (S - 1 + (V - 1)(S - g))(F + B)
                                + (V - 1)(n - 1) max(0, S max(F, B) - g(F + B))
    peak activations            min((V - 1) g + S - r, M V)

The second term is the time that every round waits for B: nothing for g >= 2S / 3 if B = 2F. If
rounds differ, the formula with the smallest round as g is an upper bound. The eager warm-up would
deadlock with g < S. The shorter warm-up has no paired ticks in lockstep, where `interleaved_zb`
with the same g is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from schedules.core.action import Action, Kind
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import rounds


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, num_stages: int, *, group: int | None = None
) -> Schedule:
    """Build the schedule: rank r runs 2(S - 1 - r) + (V - 1) g F, then (F, B) pairs, then drains.

    With ``group`` it runs S - 1 - r + (V - 1) g forward passes first.
    """
    sizes = rounds("interleaved_1f1b", num_ranks, num_microbatches, group)
    hops = 2 if group is None else 1
    chunks = num_stages // num_ranks
    total = num_microbatches * chunks
    orders = []
    for rank in range(num_ranks):
        forward = turns("F", rank, num_ranks, num_stages, sizes)
        backward = turns("B", rank, num_ranks, num_stages, sizes)
        ahead = min(hops * (num_ranks - 1 - rank) + (chunks - 1) * max(sizes), total)
        order = forward[:ahead]
        for k in range(total):
            order += forward[ahead + k : ahead + k + 1]
            order.append(backward[k])
        orders.append(tuple(order))
    placement = loop_placement(num_stages, num_ranks)
    name = "interleaved_1f1b" + f", group={group}" * (group is not None)
    return Schedule(name, num_microbatches, tuple(orders), placement)


def turns(
    kind: Kind, rank: int, num_ranks: int, num_stages: int, sizes: Sequence[int]
) -> list[Action]:
    """Return the F of a rank, or its B, I or W, in the order of rounds.

    A round is a group of ``sizes[r]`` microbatches. All microbatches of a round run on one of the
    rank's stages before they run on the next. F ascends through the stages, the others descend.
    """
    of_rank = range(rank, num_stages, num_ranks)
    return [
        Action(stage, kind, m)
        for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)
        for stage in (of_rank if kind == "F" else of_rank[::-1])
        for m in range(end - size, end)
    ]
