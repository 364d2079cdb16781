"""The values of `offload=`, which are in host memory between two actions of a rank.

The choice depends only on the order of a rank's actions, not on their times: it looks at the action
that makes a value and at the action that reads it last. U is the number of units: M microbatches
or, with N slices, M N slices.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from schedules.clocks.shared import Shared
from schedules.core.action import KINDS, ScheduleError, shorten
from schedules.core.arguments import is_number, is_one_of
from schedules.core.flat import B, F, I, Ints, Mask, W, flatten, once
from schedules.core.timetable import Timetable

Offload = str | float | None
Keep = Literal["input", "residuals"]
WORDS = ("stash", "crossings")


class Hosted(NamedTuple):
    """The values in host memory.

    Attributes:
      stash: [K, U] whether the values that F keeps for its backward are in host memory.
      crossing: [K, U] whether the values that I keeps for W are in host memory.
    """

    stash: Mask
    crossing: Mask


def check_offload(offload: object) -> Offload:
    """Return the option as a word or a share.

    Raises:
      ScheduleError: an unknown word, a share outside 0..1, or another type.
    """
    if offload is None or (isinstance(offload, str) and offload in WORDS):
        return offload
    if is_number(offload) and 0 <= offload <= 1:  # type: ignore[operator]
        return float(offload)  # type: ignore[arg-type]
    raise ScheduleError(
        f"offload={shorten(offload)}: must be 'stash' (the values that F keeps for its backward "
        f"are in host memory), 'crossings' (those that I keeps for W are), a share of the stashes "
        f"from 0 to 1 such as 0.5, or None for neither"
    )


def check_keep(keep: object) -> Keep:
    """Check and return the option that names the values F keeps for its backward."""
    if is_one_of(keep, ("input", "residuals")):
        return keep  # type: ignore[return-value]
    raise ScheduleError(f"keep={shorten(keep)}: must be 'input' or 'residuals'")


def hosted(schedule: Timetable, keep: Keep, offload: Offload, shared: Shared = ()) -> Hosted:
    """Return which values of a legal schedule are in host memory between two actions.

    With ``keep="input"`` the first stage keeps nothing, because its input is recomputed from the
    batch. If all ranks share "embed", it keeps its input like the other stages.
    """
    return _hosted(schedule, keep, offload, embeds="embed" in shared)


def moves(schedule: Timetable, keep: Keep, offload: Offload, shared: Shared = ()) -> Mask:
    """Return [A] flags, True for actions that write a value to host memory or read one from it."""
    flat, choice = flatten(schedule), hosted(schedule, keep, offload, shared)
    stash, crossing = (mask[flat.stage, flat.microbatch] for mask in choice)
    touched: Mask = (stash & (flat.kind != W)) | (crossing & np.isin(flat.kind, (I, W)))
    return touched


@once
def _hosted(schedule: Timetable, keep: Keep, offload: Offload, *, embeds: bool) -> Hosted:
    flat, shape = flatten(schedule), (schedule.num_stages, schedule.num_units)
    nothing = np.zeros(shape, bool)
    share = offload if isinstance(offload, float) else float(offload is not None)
    if not share:
        return Hosted(nothing, nothing)
    # Positions of actions in the orders of their ranks serve as times: no clock is needed.
    when = np.full((len(KINDS), *shape), -1)
    when[flat.kind, flat.stage, flat.microbatch] = np.arange(len(flat.kind)) - flat.first[flat.rank]
    if offload == "crossings":
        there = when[W] >= 0
        kinds = [I, W]
    else:
        there = when[[B, I]].max(axis=0) >= 0
        kinds = [F, B, I]
        # The first stage's input is recomputed from the batch.
        if keep == "input" and not embeds:
            there[0] = False
    rank = np.array(schedule.placement, np.int64)[np.nonzero(there)[0]]
    chosen = np.zeros(shape, bool)
    chosen[there] = choose(
        rank, when[kinds[0]][there], when[kinds].max(axis=0)[there], schedule.num_ranks, share
    )
    return Hosted(nothing, chosen) if offload == "crossings" else Hosted(chosen, nothing)


def choose(rank: Ints, born: Ints, read: Ints, num_ranks: int, share: float) -> Mask:
    """Decide [N] for each value whether it is in host memory.

    The device keeps P - floor(share * P) places, where P is the most values that any rank holds at
    once. Whenever a rank holds more, the value that is read last is kept in host memory, for its
    whole life. This greedy choice keeps the most values on the device for this number of places.
    Ranks with few values offload none of them. A value that the rank's very next action reads stays
    on the device for any share: at most one such value exists at a time.

    Args:
      rank: [N] the rank that holds each value.
      born: [N] the position, in its rank's order, of the action that makes the value.
      read: [N] the position of the action that reads the value last.
      num_ranks: S.
      share: from 0 to 1.
    """
    on_host = np.zeros(len(rank), bool)
    order = np.argsort(born, kind="stable")
    # The rank with most values determines how many places the device keeps.
    by_rank = [order[rank[order] == r] for r in range(num_ranks)]
    most = max(_peak(born[of_rank], read[of_rank]) for of_rank in by_rank)
    places = most - math.floor(share * most + 1e-9)
    if places == most:
        return on_host
    # A rank with more values than places moves the value that is held longest.
    for of_rank in by_rank:
        live: list[int] = []
        for n in of_rank.tolist():
            live = [other for other in live if read[other] > born[n]]
            live.append(n)
            if len(live) > places:
                can_go = [other for other in live if read[other] > born[other] + 1]
                if can_go:
                    last = max(can_go, key=lambda other: read[other])
                    live.remove(last)
                    on_host[last] = True
    return on_host


def _peak(born: Ints, read: Ints) -> int:
    """Count the most values held at once, for one rank's values in the order of their making."""
    gone = np.searchsorted(np.sort(read), born, side="right")
    return int((np.arange(1, len(born) + 1) - gone).max(initial=0))
