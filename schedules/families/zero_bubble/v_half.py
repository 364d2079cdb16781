"""V-Half: half the memory of 1F1B, from a V whose way back is short.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362. F, I and
W are the durations for one stage, which has half of a rank's layers.

    idle on the critical rank   (3S - 7)F if S is even, (3S - 4)F if it is odd,
                                at F = I = W, if M >= S > 2
    peak activations            min(2 ((S + 2) // 2), 2M), a stage's inputs each: as much as
                                (S + 2) // 2 microbatches of 1F1B, which holds S
"""

from __future__ import annotations

from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import need_stages_per_rank
from schedules.families.constructions.v_slots import from_pattern


def v_half(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    need_stages_per_rank("v_half", 2, num_ranks, num_stages)
    wait = 0 if num_ranks % 2 else 3  # before the backward, so that no two steps share a slot
    pattern = [
        (
            2 * rank,
            3 * num_ranks - 2 - rank,
            3 * num_ranks - 1 + wait + 2 * rank,
            6 * num_ranks - 2 + wait - rank,
        )
        for rank in range(num_ranks)
    ]
    return from_pattern("v_half", num_microbatches, pattern)
