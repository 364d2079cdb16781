"""How many stage inputs a rank holds, over time: what a report's peaks are the peaks of.

Letters as in `schedules.ir`.
"""

from __future__ import annotations

import numpy as np

from schedules.core.flat import Ints, flatten, inputs_held, takes_and_frees
from schedules.report import Report


def held(report: Report) -> tuple[tuple[tuple[float, int], ...], ...]:
    """[S] tuples of (time, inputs held from then on), in order of time, one per change."""
    flat = flatten(report.schedule)
    ranks = zip(np.split(flat.kind, flat.first[1:-1]), report.starts, report.ends, strict=True)
    return tuple(_rank(*columns) for columns in ranks)


def _rank(
    kinds: Ints, starts: tuple[float, ...], ends: tuple[float, ...]
) -> tuple[tuple[float, int], ...]:
    taken, freed = (flags.tolist() for flags in takes_and_frees(kinds))
    steps: list[tuple[float, int]] = []
    for n, count in enumerate(inputs_held(kinds).tolist()):
        if taken[n]:
            steps.append((starts[n], count))
        if freed[n]:
            steps.append((ends[n], count - 1))
    return tuple(steps)
