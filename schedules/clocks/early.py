"""The choice of reads from host memory that start an action early.

A backward whose stash lies in host memory may find that its own work is too short to hide the copy,
or hides none of it. The copy can then travel beside an earlier action of the same rank, into a
place on the device. That action writes nothing to host memory: a write and a read of one pool wait
for each other. Letters as in `schedules.core.action`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

import numpy as np

from schedules.clocks.hosted import Keep, Offload, hosted, moves
from schedules.clocks.shared import Shared
from schedules.core.costs import Costs, HostCopies, Times
from schedules.core.flat import B, F, I, Mask, flatten
from schedules.core.timetable import Timetable

REACH = 8  # actions before a backward among which one is looked for
SAME = 1e-9  # relative


def host_copies(
    schedule: Timetable, keep: Keep, offload: Offload, costs: Costs, shared: Shared = ()
) -> HostCopies:
    """Find the copies of all actions over the host link.

    Args:
      schedule: a legal one.
      keep: as of `schedules.clocks.hosted.hosted`. The input of a stage is never read early.
      offload: as `schedules.clocks.hosted.check_offload` returns it.
      costs: durations. A read starts early where this shortens its backward by more than it
        lengthens the action that the copy travels beside.
      shared: which ends of the model all ranks share.
    """
    flat = flatten(schedule)
    own = moves(schedule, keep, offload, shared)
    copies = HostCopies(own, np.full(len(own), -1, np.int64))
    sizes = schedule.num_stages, schedule.num_slices
    units = flat.kind, flat.stage, flat.microbatch
    alone = costs.durations(*units, sizes, shared)
    waits = costs.durations(*units, sizes, shared, copies)
    chosen = hosted(schedule, keep, offload, shared).stash[flat.stage, flat.microbatch]
    reads: Mask = chosen & np.isin(flat.kind, (B, I)) & (waits > alone)
    if keep == "input" or not reads.any():
        return copies
    link = costs.links(flat.stage, sizes)
    return _chosen(schedule, reads, copies, (alone, waits), link, costs.overlaps[2])


def _chosen(
    schedule: Timetable,
    reads: Mask,
    copies: HostCopies,
    lasting: tuple[Times, Times],
    link: Times,
    share: float,
) -> HostCopies:
    """Give each backward that ``reads`` the action beside which its copy costs least.

    A place on the device holds the stash from that action to the backward. So that one place is
    enough for those on their way, no read starts before the backward of the read before.

    Args:
      schedule: whose actions they are.
      reads: [A] backwards that would gain.
      copies: what travels without early reads.
      lasting: [A] each, how long actions last without copies, and with those.
      link: [A] how long the stash of an action travels.
      share: of an action's work, beside which an early read travels.
    """
    flat = flatten(schedule)
    own, early = copies.own.copy(), copies.early.copy()
    writes = own & (flat.kind == F)
    alone, waits = lasting
    born = np.zeros((schedule.num_stages, schedule.num_units), np.int64)
    forward = np.flatnonzero(flat.kind == F)
    born[flat.stage[forward], flat.microbatch[forward]] = forward
    before = 0  # the last backward whose read is early
    for n in np.flatnonzero(reads).tolist():
        lowest = max(int(born[flat.stage[n], flat.microbatch[n]]) + 1, n - REACH, before)
        best, price = -1, waits[n] - alone[n]
        for c in range(n - 1, lowest - 1, -1):
            lasts = waits[c] if own[c] else alone[c]
            paid = max(0.0, link[n] + own[c] * link[c] + (1 - share) * alone[c] - lasts)
            # Behind a copy of its own nothing is gained yet, but for the read after this one.
            least = price * (1 + SAME if own[c] else 1 - SAME)
            if not writes[c] and paid < least:
                best, price = c, paid
        if best >= 0:
            early[best], own[n], before = n, False, n
    return HostCopies(own, early)
