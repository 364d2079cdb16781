"""ZB-H2: ZB-H1 with a warm-up twice as long, whose forward passes fill the ramp too.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, arXiv:2401.10241. A rank's span has almost
no bubble, but ranks start and end one after another. A step that all ranks end together, for
example for a global norm of the gradients, waits for the last rank.

    idle on the critical rank   (S - 1)(F + I - 2W) if M >= 2S - 1, else (S - 1)(F + I) - (M - 1)W;
                                provided that neither F nor I is shorter than W
    peak activations            min(2S - 1, M): 2(S - r) - 1 that wait for I and 2r that wait for W
"""

from __future__ import annotations

from schedules.core.action import Action
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families.constructions.sizes import need_stages_per_rank


def zb_h2(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: W on rank r runs 2r microbatches after I."""
    need_stages_per_rank("zb_h2", 1, num_ranks, num_stages)
    orders = []
    for rank in range(num_ranks):
        ahead, behind = 2 * (num_ranks - rank) - 1, 2 * rank
        order = [Action(rank, "F", m) for m in range(min(ahead, num_microbatches))]
        for m in range(num_microbatches):
            order.append(Action(rank, "I", m))
            if m >= behind:
                order.append(Action(rank, "W", m - behind))
            if ahead + m < num_microbatches:
                order.append(Action(rank, "F", ahead + m))
        late = range(max(0, num_microbatches - behind), num_microbatches)
        orders.append((*order, *(Action(rank, "W", m) for m in late)))
    placement = loop_placement(num_stages, num_ranks)
    return Schedule("zb_h2", num_microbatches, tuple(orders), placement)
