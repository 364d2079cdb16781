"""GPipe: all forward passes, then all backward passes.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv:1811.06965. F and B are the durations for one stage, which has 1/V of a rank's
layers.

    idle on the critical rank   (S - 1)(F + B) if M >= S, also in lockstep;
                                else (S - 1 + (V - 1)(S - M))(F + B)
    peak activations            M V
"""

from __future__ import annotations

import numpy as np

from schedules.core.schedule import Schedule
from schedules.families.constructions.fold import fold


def gpipe(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build the schedule: stage k runs F(m) at time k + m, and B(m) after every F has run."""
    k, m = np.ogrid[:num_stages, :num_microbatches]
    drain = 2 * (num_stages - 1) + num_microbatches
    return fold("gpipe", num_ranks, {"F": k + m, "B": drain - k + m})
