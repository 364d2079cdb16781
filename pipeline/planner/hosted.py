"""Stashes in host memory, of layouts that do not fit without: how many, and whether that pays.

Letters as in `pipeline.planner.layout`; P is the most stashes that a rank holds at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pipeline.planner.costs import Estimate
from pipeline.planner.layout import MeshLayout, PlannedJob
from pipeline.planner.makespan import places
from pipeline.planner.memory import COPIES, pipeline_bytes, stash_bytes, usable
from pipeline.planner.plans import short


def with_offload(job: PlannedJob, layouts: Iterable[MeshLayout]) -> Iterator[MeshLayout]:
    """Offload the smallest share that fits, for each pipeline that does not fit without."""
    room = usable(job)
    for layout in layouts:
        if layout.schedule is None:
            continue
        over = sum(pipeline_bytes(job, layout).values()) - room
        if over <= 0:
            continue
        most, _ = places(layout.schedule, layout.stage, layout.chunks, layout.microbatches)
        moved = math.ceil(over / stash_bytes(job, layout) + COPIES)
        if moved <= most:
            yield replace(layout, offload=min(1.0, math.ceil(1e4 * moved / most) / 1e4))


@dataclass(frozen=True)
class Comparison:
    """The best pipeline with stashes in host memory beside the best without.

    Attributes:
      hosted: the best that offloads; None if none fits that does not fit without.
      plain: the best that does not; None if none fits.
    """

    hosted: Estimate | None
    plain: Estimate | None

    def __str__(self) -> str:
        """A sentence that says whether to offload, and why."""
        if self.hosted is None:
            return (
                "do not offload: no pipeline that is short of memory fits with its stashes in host "
                "memory"
            )
        one = f"{_named(self.hosted)} takes {self.hosted.step:.4g} s"
        copies = f"copies that no work hides take {self.hosted.seconds['host']:.3g} s"
        if self.plain is None:
            return f"offload: {one}, of which {copies}; no pipeline fits without"
        again = self.plain.seconds["recompute"]
        other = (
            f"the best pipeline without, {_named(self.plain)}, {self.plain.step:.4g} s, of which "
            f"computing again takes {again:.3g} s"
        )
        if self.hosted.step < self.plain.step:
            return f"offload: {one}, of which {copies}; {other}"
        return f"do not offload: {other}; {one}, of which {copies}"


def _named(one: Estimate) -> str:
    """Name a layout with its remat, and its share in host memory."""
    layout = one.layout
    hosted = "" if layout.offload is None else f" and {layout.offload:.0%} of stashes on the host"
    return f"{short(layout)} with remat {layout.remat or 'none'}{hosted}"
