"""Interleaved 1F1B: ranks that hold V stages each alternate between them, to fill sooner.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, arXiv:2104.04473; the rule for M is that of ``torch.distributed.pipelining``. Letters as in
`schedules.core.action`, r a rank; F and B are the times of one stage, a V-th of a rank's layers.

    idle on the critical rank   (S - 1)(F + B) if M >= S,
                                else (S - 1 + (V - 1)(S - M))(F + B)
    peak activations            min(2(S - 1 - r) + (V - 1) g + 1, M V)

g = M / max(1, M // S) is how many microbatches run through a chunk before the next one's turn: S,
if S divides M.

Beyond the (V - 1) g of the chunks this warm-up, Megatron's, is 2(S - 1 - r) long: the eager one, so
that in paired ticks F and B share every tick, as in `eager_1f1b`. Lockstep then costs nothing: at
S = 8, M = 32, V = 2 and F = I = W, efficiency is .901 in paired ticks as on the event clock, and
.716 with one action per tick.
"""

from __future__ import annotations

from schedules.core.action import Action, Kind
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import group
from schedules.orders.schedule import Schedule


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build it; rank r runs 2(S - 1 - r) + (V - 1) g forward passes, (F, B) pairs, then drains.

    Raises:
      ScheduleError: M does not make rounds of equal size.
    """
    size = group("interleaved_1f1b", num_ranks, num_microbatches)
    chunks = num_stages // num_ranks
    total = num_microbatches * chunks
    orders = []
    for rank in range(num_ranks):
        forward = turns("F", rank, num_ranks, num_microbatches, num_stages, size)
        backward = turns("B", rank, num_ranks, num_microbatches, num_stages, size)
        ahead = min(2 * (num_ranks - 1 - rank) + (chunks - 1) * size, total)
        order = forward[:ahead]
        for k in range(total):
            order += forward[ahead + k : ahead + k + 1]
            order.append(backward[k])
        orders.append(tuple(order))
    placement = loop_placement(num_stages, num_ranks)
    return Schedule("interleaved_1f1b", num_microbatches, tuple(orders), placement)


def turns(
    kind: Kind, rank: int, num_ranks: int, num_microbatches: int, num_stages: int, size: int
) -> list[Action]:
    """All actions of a kind on a rank: ``size`` microbatches of each chunk in turn, round by round.

    F takes the chunks in layer order, the backward kinds in reverse.
    """
    of_rank = range(rank, num_stages, num_ranks)
    return [
        Action(stage, kind, m)
        for first in range(0, num_microbatches, size)
        for stage in (of_rank if kind == "F" else of_rank[::-1])
        for m in range(first, first + size)
    ]
