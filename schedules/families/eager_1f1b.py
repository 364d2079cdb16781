"""Eager 1F1B: 1F1B with a warm-up twice as long, so that F and B share every tick.

The order of `1f1b` lets a rank run ahead by S - r forward passes. With one action per tick, some
ranks then run F while others run B, and every tick waits for the B. Running ahead by 2(S - 1 - r) +
1 puts all F in one slot of the tick and all B in the other. This is the warm-up of "eager 1F1B" in
Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023, arXiv:2211.05322,
which uses it to hide messages. For V = 1:

    idle on the critical rank   (S - 1)(F + B), also in lockstep
    peak activations            min(2(S - 1 - r) + 1, M)
"""

from __future__ import annotations

import numpy as np

from schedules.core.action import Kind
from schedules.core.flat import Ints
from schedules.core.schedule import Schedule
from schedules.families.constructions.fold import fold


def eager_1f1b(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: stage k runs F(m) in tick m + k, B(m) in m + 2(K-1) - k, F first."""
    k, m = np.ogrid[:num_stages, :num_microbatches]
    times: dict[Kind, Ints] = {"F": 2 * (m + k), "B": 2 * (m + 2 * (num_stages - 1) - k) + 1}
    return fold("eager_1f1b", num_ranks, times)
