"""The list of published schedules, one per file: from sizes to an order of actions.

A file has the name of its family and cites the publication. `FAMILIES` lists the families that do
not depend on costs, `GROUPED` the families with rounds of microbatches, and `SLICED` the families
with slices. Code that several families share is in `schedules.families.constructions`. A family
decides only orders, no clocks, slots or buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from schedules.core.schedule import Schedule
from schedules.families.dualpipe_v import dualpipe_v
from schedules.families.eager_1f1b import eager_1f1b
from schedules.families.gpipe import gpipe
from schedules.families.interleaved_1f1b import interleaved_1f1b
from schedules.families.interleaved_zb import interleaved_zb
from schedules.families.looped_bfs import looped_bfs
from schedules.families.one_f_one_b import one_f_one_b
from schedules.families.seq1f1b import seq1f1b, seq1f1b_zb
from schedules.families.zero_bubble.v_half import v_half
from schedules.families.zero_bubble.v_min import v_min
from schedules.families.zero_bubble.zb_h1 import zb_h1
from schedules.families.zero_bubble.zb_h2 import zb_h2
from schedules.families.zero_bubble.zb_v import zb_v

# Families that cut the sequences of microbatches into slices; they also take ``num_slices=``.
SLICED: dict[str, Callable[..., Schedule]] = {"seq1f1b": seq1f1b, "seq1f1b_zb": seq1f1b_zb}

# Families with rounds of microbatches; they also take ``group=``, the size of a round.
GROUPED: dict[str, Callable[..., Schedule]] = {
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zb": interleaved_zb,
}

Family = Callable[[int, int, int], Schedule]  # (num_ranks, num_microbatches, num_stages)

FAMILIES: dict[str, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
