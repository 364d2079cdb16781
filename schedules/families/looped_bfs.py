"""Looped breadth-first: all microbatches through one chunk of a rank, then through the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv:2211.05953. F and B are the
durations for one stage, which has 1/V of a rank's layers.

    idle on the critical rank   (S - 1)(F + B) if M >= S, also in lockstep;
                                else (S - 1 + (V - 1)(S - M))(F + B)
    peak activations            M V
"""

from __future__ import annotations

from schedules.core.action import Action
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement


def looped_bfs(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: stages ascend for F and descend for B, microbatches always ascend."""
    microbatches, orders = range(num_microbatches), []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forward = (Action(stage, "F", m) for stage in stages for m in microbatches)
        backward = (Action(stage, "B", m) for stage in stages[::-1] for m in microbatches)
        orders.append((*forward, *backward))
    placement = loop_placement(num_stages, num_ranks)
    return Schedule("looped_bfs", num_microbatches, tuple(orders), placement)
