"""ZB-H1: 1F1B with split backward passes, whose weight gradients fill the drain.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241.

    idle on the critical rank   (S - 1)(F + I - W) if M >= S, else (S - 1)(F + I) - (M - 1)W;
                                provided that neither F nor I is shorter than W
    peak activations            min(S, M): S - r that wait for I and r that wait for W
"""

from __future__ import annotations

from schedules.core.action import Action
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import need_stages_per_rank


def zb_h1(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: W on rank r runs r microbatches after I."""
    need_stages_per_rank("zb_h1", 1, num_ranks, num_stages)
    orders = []
    for rank in range(num_ranks):
        ahead = num_ranks - 1 - rank
        order = [Action(rank, "F", m) for m in range(min(ahead, num_microbatches))]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                order.append(Action(rank, "F", ahead + m))
            order.append(Action(rank, "I", m))
            if m >= rank:
                order.append(Action(rank, "W", m - rank))
        late = range(max(0, num_microbatches - rank), num_microbatches)
        orders.append((*order, *(Action(rank, "W", m) for m in late)))
    placement = loop_placement(num_stages, num_ranks)
    return Schedule("zb_h1", num_microbatches, tuple(orders), placement)
