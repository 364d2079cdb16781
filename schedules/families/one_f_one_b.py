"""1F1B: after a short warm-up every rank alternates a forward with a backward pass.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019;
synchronous, flushed form: Fan et al., "DAPPLE", PPoPP 2021, arXiv:2007.01045. For V = 1:

    idle on the critical rank   (S - 1)(F + B)
    peak activations            min(S - r, M)

With one action per tick, the F of a rank and the B of another share a tick, which lasts as long as
the B. At S = 8, M = 32 and F = I = W, efficiency falls from .821 on the event clock to .649 in
lockstep. In partner ticks, whose exchanges synchronize only sender and receiver, both clocks give
the same time.
"""

from __future__ import annotations

import numpy as np

from schedules.core.action import Kind
from schedules.core.flat import Ints
from schedules.core.schedule import Schedule
from schedules.families.constructions.fold import fold


def one_f_one_b(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: stage k runs min(K-1-k, M) F, then (F, B) pairs, then drains.

    With V > 1 the timetable of K ranks is folded: stage k runs F(m) at half-step k + 2m and B(m) at
    2K - 1 - k + 2m. These are the times of the steady state, and they keep the order of every
    stage.
    """
    k, m = np.ogrid[:num_stages, :num_microbatches]
    times: dict[Kind, Ints] = {"F": k + 2 * m, "B": 2 * num_stages - 1 - k + 2 * m}
    return fold("1f1b", num_ranks, times)
