"""Buffer allocation: what ranks hold between slots, from when until when, and in which place.

A value holds its place from the slot at whose end it arrives to the slot that reads it last. A
freed place is used again, so the number of places is the true peak. Letters as in
`schedules.core.action`; N is a number of values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.clocks.hosted import Keep
from schedules.clocks.shared import Shared
from schedules.clocks.ticks import Ticks
from schedules.core.action import KINDS
from schedules.core.flat import B, F, I, Ints, Mask, W, flatten


class Values(NamedTuple):
    """Values that are read through one table column.

    Attributes:
      rank: [N] who holds it.
      source: [N] the rank that sends it; the holder, if it stays.
      born: [N] the time of the slot at whose end it is there; -1 if before the first.
      read: [N] the time of the slot that reads it last.
      touched: [4, N] the times of the slots that point at it, F, B, I and W; -1 for none.
    """

    rank: Ints
    source: Ints
    born: Ints
    read: Ints
    touched: Ints


def values(ticks: Ticks, keep: Keep, shared: Shared = ()) -> dict[str, Values]:
    """All values of a layout by table column; those of operand and gradient arrive in buffers.

    Those of one column are in the order of stages, then of units.
    """
    schedule, flat = ticks.schedule, flatten(ticks.schedule)
    shape = (schedule.num_stages, schedule.num_units)
    when = np.full((len(KINDS), *shape), -1)
    when[flat.kind, flat.stage, flat.microbatch] = ticks.times
    forward, is_trained = when[F], (when[[B, I, W]] >= 0).any(axis=0)
    runs_f, backs, ends = (_those(*kinds) for kinds in ((F,), (B, I), (I, W)))
    home = np.array(schedule.placement, np.int64)
    has_input, is_last = np.zeros(shape, bool), np.zeros(shape, bool)
    has_input[1:] = is_last[-1] = True
    source, made = np.roll(home, 1), np.roll(forward, 1, axis=0)
    if "embed" in shared:  # all ranks make it, just before it is read
        has_input[0], source[0], made[0] = True, home[0], forward[0] - 1
    with_residuals = np.full(shape, keep == "residuals")
    # The loss is taken, and differentiated, in the last stage's backward: it keeps its own output.
    # Where all ranks share the head, they make the gradient in the slot of that output.
    sender = np.append(home[1:], home[-1])
    sent = np.concatenate([np.maximum(when[B], when[I])[1:], forward[-1:]])
    late = ticks.delayed
    return {
        "operand": _values(
            has_input,
            home,
            source,
            made + (late & (source != home))[:, None],
            np.where(runs_f | (backs & ~with_residuals), when, -1),
        ),
        "gradient": _values(
            is_trained & (with_residuals | ~is_last | ("head" in shared)),
            home,
            sender,
            sent + (late & (sender != home))[:, None],
            np.where(backs, when, -1),
        ),
        "stash": _values(
            is_trained & with_residuals, home, home, forward, np.where(runs_f | backs, when, -1)
        ),
        "crossing": _values(when[W] >= 0, home, home, when[I], np.where(ends, when, -1)),
    }


def _those(*kinds: int) -> Mask:
    """[4, 1, 1] whether a kind is one of these."""
    return np.isin(np.arange(len(KINDS)), kinds)[:, None, None]


def _values(there: Mask, home: Ints, source: Ints, born: Ints, touched: Ints) -> Values:
    """Values of the stages and units, [K, M * N], that are ``there``."""
    stage = np.nonzero(there)[0]
    times = touched[:, there]
    return Values(home[stage], source[stage], born[there], times.max(axis=0), times)


def colour(rank: Ints, born: Ints, read: Ints, num_ranks: int) -> tuple[int, Ints]:
    """Colour values with places so that no rank's live values share one; [N] the place of each.

    A value read for the last time in the slot at whose end another arrives makes room for it.
    Every rank takes its places in turn: as many fresh ones as it ever holds values at once, then
    those that are given back, first come first served. The n-th value finds a place: of the n
    before it no more than that peak, less one, are still there.
    """
    if not len(rank):
        return 0, np.zeros(0, np.int64)
    stride = int(read.max()) + 2
    arrival, departure = rank * stride + born + 1, rank * stride + read + 1
    arriving = np.argsort(arrival, kind="stable")
    leaving = np.argsort(departure, kind="stable")
    first = np.searchsorted(rank[arriving], np.arange(num_ranks + 1))
    begin = first[rank[arriving]]
    nth = np.arange(len(rank)) - begin
    gone = np.searchsorted(departure[leaving], arrival[arriving], side="right") - begin
    peak = np.zeros(num_ranks, np.int64)
    np.maximum.at(peak, rank[arriving], nth + 1 - gone)
    behind = nth - peak[rank[arriving]]  # which departure it takes the place of, if not negative
    heir = behind >= 0
    before = np.arange(len(rank))  # the value whose place it takes
    before[arriving[heir]] = leaving[(begin + behind)[heir]]
    while (before != before[before]).any():
        before = before[before]
    place = np.empty_like(nth)
    place[arriving] = nth
    return int(peak.max()), place[before]
