"""V-Min: a third of the memory of 1F1B, from a V that is equally steep on both ways.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362. F, I and
W are the durations for one stage, which has half of a rank's layers.

    idle on the critical rank   (4S - 5)F, (4S - 7)F if 3 divides S,
                                at F = I = W, if M >= S > 2
    peak activations            min(2 ((S + 4) // 3), 2M), a stage's inputs each: as much as
                                (S + 4) // 3 microbatches of 1F1B, which holds S
"""

from __future__ import annotations

from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import need_stages_per_rank
from schedules.families.constructions.v_slots import from_pattern


def v_min(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    need_stages_per_rank("v_min", 2, num_ranks, num_stages)
    wait = 0 if num_ranks % 3 else 2  # before the backward, so that no two steps share a slot
    pattern = [
        (
            rank,
            2 * num_ranks - 1 - rank,
            2 * num_ranks + wait + rank,
            4 * num_ranks - 1 + wait - rank,
        )
        for rank in range(num_ranks)
    ]
    return from_pattern("v_min", num_microbatches, pattern)
