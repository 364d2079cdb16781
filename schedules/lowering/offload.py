"""The choice of the values that lie in host memory between two actions of a rank.

Letters as in `schedules.core.action`, N as in `schedules.lowering.places`.
"""

from __future__ import annotations

import math

import numpy as np

from schedules.clocks.ticks import Ticks
from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import is_number
from schedules.core.flat import B, F, I, Ints, Mask, flatten
from schedules.lowering.places import Values

Offload = str | float | None
WORDS = ("stash", "crossings")


def check_offload(offload: object) -> Offload:
    """Return the option as a word or a share.

    Args:
      offload: "stash" (all stashes that outlive the next action of their rank), "crossings" (the
        values that I leaves for W, likewise), a share of the stashes from 0 to 1, or None.

    Raises:
      ScheduleError: an unknown word, a share outside 0..1, or another type.
    """
    if offload is None or (isinstance(offload, str) and offload in WORDS):
        return offload
    if is_number(offload) and 0 <= offload <= 1:  # type: ignore[operator]
        return float(offload)  # type: ignore[arg-type]
    raise ScheduleError(
        f"offload={shorten(offload)}: must be 'stash' (what F keeps for its backward lies in host "
        f"memory), 'crossings' (what I leaves for W does), a share of the stashes from 0 to 1 such "
        f"as 0.5, or None for neither"
    )


def inputs_held(operands: Values) -> tuple[Mask, Values]:
    """The stage inputs that a backward reads again, as values that F keeps.

    Args:
      operands: the inputs of all actions, in message buffers.

    Returns:
      [N] which operands are kept; and those, born when their F runs.
    """
    kept = operands.touched[[B, I]].max(axis=0) >= 0
    rank, source, _, read, touched = (column[..., kept] for column in operands)
    return kept, Values(rank, source, touched[F], read, touched)


def without_backward(operands: Values, hosted: Ints) -> Values:
    """The operands, of which those at the given indices are read by their F alone."""
    touched = operands.touched.copy()
    for kind in (B, I):
        touched[kind, hosted] = -1
    return operands._replace(touched=touched, read=touched.max(axis=0))


def choose_hosted(ticks: Ticks, held: Values, share: float) -> Mask:
    """[N] whether each value lies in host memory.

    The device keeps P - floor(share * P) places, where P is the most values that any rank holds at
    once. Whenever a rank holds more, the value that is read last of all goes to the host, for all
    of its life. This greedy choice keeps as many values on the device as so many places can hold.
    Ranks with few values offload none of them. A value that the rank's very next action reads
    stays on the device, whatever the share: at most one exists at a time.
    """
    found = np.zeros(len(held.rank), bool)
    count = ticks.schedule.num_ranks
    order = np.argsort(held.born, kind="stable")
    by_rank = [order[held.rank[order] == rank] for rank in range(count)]
    most = max(_peak(held.born[own], held.read[own]) for own in by_rank)
    places = most - math.floor(share * most + 1e-9)
    if places == most:
        return found
    stays = _read_next(ticks, held)
    for own in by_rank:
        live: list[int] = []
        for n in own.tolist():
            live = [other for other in live if held.read[other] > held.born[n]]
            live.append(n)
            if len(live) > places:
                can_go = [other for other in live if not stays[other]]
                if can_go:
                    last = max(can_go, key=lambda other: held.read[other])
                    live.remove(last)
                    found[last] = True
    return found


def _peak(born: Ints, read: Ints) -> int:
    """The most values that are held at once, of those of one rank in the order of their births."""
    gone = np.searchsorted(np.sort(read), born, side="right")
    return int((np.arange(1, len(born) + 1) - gone).max(initial=0))


def _read_next(ticks: Ticks, held: Values) -> Mask:
    """[N] whether a value is made by an action of its rank and read last by the next one."""
    nth = np.zeros((ticks.num_ticks * ticks.width, ticks.schedule.num_ranks), np.int64)
    nth[ticks.times, flatten(ticks.schedule).rank] = np.arange(len(ticks.times))
    return np.asarray(nth[held.read, held.rank] == nth[held.born, held.rank] + 1)
