"""GPipe: all forward passes, then all backward passes.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019, arXiv:1811.06965. Letters as in `schedules.ir`; F and B are the times of one
stage, a V-th of a rank's layers.

    idle on the critical rank   (S - 1)(F + B) if M >= S, also in lockstep;
                                else (S - 1 + (V - 1)(S - M))(F + B)
    peak activations            M V
"""

from __future__ import annotations

from schedules.ir import Action, Schedule, fold


def gpipe(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    """Build it; stage k runs F(m) at time k + m and B(m) once every F has run."""
    last = num_stages - 1
    drain = last + num_microbatches
    timed = [
        entry
        for k in range(num_stages)
        for m in range(num_microbatches)
        for entry in (
            (k + m, Action(k, "F", m)),
            (drain + last - k + m, Action(k, "B", m)),
        )
    ]
    return fold("gpipe", num_ranks, num_microbatches, num_stages, timed)
