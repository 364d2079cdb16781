"""Gradient accumulation on one rank: all stages forward, then all backward, for each microbatch.

It is the default for a mesh of one rank. It takes no number of ranks, so it is not in `FAMILIES`.

    idle                 none
    peak activations     V
"""

from __future__ import annotations

from schedules.core.action import Action, Kind
from schedules.core.schedule import Schedule, from_orders


def accumulation(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the schedule: a microbatch goes through all stages and back before the next."""
    passes: tuple[tuple[Kind, range], ...]
    passes = ("F", range(num_stages)), ("B", range(num_stages)[::-1])
    order = [
        Action(stage, kind, microbatch)
        for microbatch in range(num_microbatches)
        for kind, stages in passes
        for stage in stages
    ]
    return from_orders([order], name="accumulation")


def is_accumulation(schedule: Schedule) -> bool:
    """Tell whether one rank finishes each microbatch, in ascending order, before the next."""
    if schedule.num_ranks > 1:
        return False
    wanted = accumulation(schedule.num_stages, schedule.num_microbatches)
    return schedule.orders == wanted.orders
