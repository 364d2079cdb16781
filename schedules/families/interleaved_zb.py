"""Interleaved zero bubble: interleaved 1F1B with split backward passes, as ZB-H1 is to 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241, applied to the order of
Narayanan et al., SC 2021, arXiv:2104.04473; ``torch.distributed.pipelining`` has the same form and
rule for M. F, I and W are the durations for one stage, which has 1/V of a rank's layers.

    idle on the critical rank   (S - 1)(F + I - W), if M >= S and neither F nor I is under W
    peak activations            min((V - 1) g + S, M V)

g = M / max(1, M // S) is the number of microbatches that run through a chunk before the next chunk
begins: S, if S divides M.

With ``group=g``, S / 2 <= g <= S, rounds have g microbatches, and g = S / 2 halves the activations
held. This is the generalized interleaved schedule (GIS) of Wan et al., "PipeOffload", 2025,
arXiv:2503.01328. In GIS, W runs right after its I; here W runs r actions later, so that it fills
the drain.

    idle on the critical rank   (S - 1)(F + I - W) + (V - 1)((S - g)F + max(0, S I - g(I + W)))
                                + max(0, (S - g - 1)W + (S - g) max(0, I - F) - (2g - S)F) if V > 1
    peak activations            min((V - 1) g + S, M V)

In the warm-up, each round waits (S - g)F until its first microbatch has passed all ranks; the drain
of I has a corresponding wait. The last term is the idle time between the last F of the warm-up and
the first I. Idle time is exact for W <= F <= I and M = 2g, 3g, .... If rounds differ, the formula
with the smallest round as g is an upper bound. A chunk's turn must be long enough, S max(F, I) <=
g(F + I + W); else every round waits. If g = S and S divides M, the timetable is that without
``group``.
"""

from __future__ import annotations

from schedules.core.action import Kind
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import rounds
from schedules.families.interleaved_1f1b import turns


def interleaved_zb(
    num_ranks: int, num_microbatches: int, num_stages: int, *, group: int | None = None
) -> Schedule:
    """Build the schedule: rank r runs (V - 1) g + S - 1 - r F first, and W r actions after I."""
    sizes = rounds("interleaved_zb", num_ranks, num_microbatches, group)
    chunks = num_stages // num_ranks
    total = num_microbatches * chunks
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    orders = []
    for rank in range(num_ranks):
        forward, backward, weights = (
            turns(kind, rank, num_ranks, num_stages, sizes) for kind in kinds
        )
        ahead = min((chunks - 1) * max(sizes) + num_ranks - 1 - rank, total)
        order = forward[:ahead]
        for k in range(total):
            order += forward[ahead + k : ahead + k + 1]
            order.append(backward[k])
            if k >= rank:
                order.append(weights[k - rank])
        orders.append((*order, *weights[max(0, total - rank) :]))
    placement = loop_placement(num_stages, num_ranks)
    name = "interleaved_zb" + f", group={group}" * (group is not None)
    return Schedule(name, num_microbatches, tuple(orders), placement)
