"""The place of every value, and the slots between which a rank keeps it.

A value occupies its place from the slot at whose end it exists to the slot that reads it last. A
freed place is used again, so the number of places is the true peak. n is a number of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from schedules.clocks.hosted import Hosted, Keep
from schedules.clocks.shared import Shared
from schedules.clocks.ticks import Ticks
from schedules.core.action import KINDS
from schedules.core.flat import B, F, I, Ints, Mask, flatten
from schedules.lowering.kinds import ValueKind, kinds_of, touches


class Values(NamedTuple):
    """The values of one kind, in the order of stages, then of units.

    Attributes:
      rank: [n] the rank that keeps the value.
      source: [n] the rank that sends the value, which may be the same rank; -1 for a value that is
        not sent.
      born: [n] the time of the slot at whose end the value exists; -1 if before the first slot.
      touched: [uses, n] the times of the slots that write or read the value; -1 for none.
      column: [n] the entry of an action's row that names the value: its slice, or 0 if the kind has
        one entry.
      on_host: [n] whether the value is in host memory.
    """

    rank: Ints
    source: Ints
    born: Ints
    touched: Ints
    column: Ints
    on_host: Mask

    @property
    def read(self) -> Ints:
        """The time [n] of the last slot that reads each value."""
        last: Ints = self.touched.max(axis=0)
        return last

    def chosen(self, mask: Mask) -> Values:
        """Select the values for which a mask [n] is true."""
        columns: Any = (column[..., mask] for column in self)
        return Values(*columns)


class Places(NamedTuple):
    """The places of one kind of values.

    Attributes:
      of: [n] the place of each value.
      host: the number of places in host memory.
    """

    of: Ints
    device: int
    host: int


def values(ticks: Ticks, keep: Keep, shared: Shared, hosted: Hosted) -> dict[ValueKind, Values]:
    """Collect all values of a layout, by kind; an action with the time -1 does not run."""
    schedule, flat = ticks.schedule, flatten(ticks.schedule)
    N, shape = schedule.num_slices, (schedule.num_stages, schedule.num_units)
    when = np.full((len(KINDS), *shape), -1)
    when[flat.kind, flat.stage, flat.microbatch] = ticks.times
    forward, backward = when[F], np.maximum(when[B], when[I])
    home, nobody = np.array(schedule.placement, np.int64), np.full(schedule.num_stages, -1)

    # The rank that sends a value, and when it exists. Inputs come from the stage before. An
    # embedding that all ranks make together is made just before it is read, and is not sent.
    before, sent = np.roll(home, 1), np.roll(forward, 1, axis=0)
    sent[before != home] += ticks.delayed
    before[0], sent[0] = -1, forward[0] - 1
    # Gradients come from the stage after; the last stage's F, or the shared head, makes its own.
    after = np.append(home[1:], home[-1])
    returned = np.concatenate([backward[1:], forward[-1:]])
    returned[after != home] += ticks.delayed
    origins = {"operand": (before, sent), "gradient": (after, returned)}
    # The backward of slice N-1 writes the gradients of all carries.
    origins["carry_gradient"] = nobody, np.repeat(backward[:, N - 1 :: N], N, axis=1)
    stashes, on_host = hosted.stash | (keep == "residuals"), hosted._asdict()
    live: dict[ValueKind, Values] = {}
    for kind in kinds_of(N):
        # All other values exist after the action that writes them.
        written = when[[letter in kind.writes for letter in KINDS]].max(axis=0, initial=-1)
        source, born = origins.get(kind.name, (nobody, written))
        times = np.where(touches(kind, keep, stashes, shared), when, -1)
        if kind.per_slice:
            times = _of_later_slices(times, N, kind.writes)
        # A value that no action reads after it exists is left out.
        there = times.max(axis=0) > np.maximum(born, -1)
        stage, unit = np.nonzero(there)
        live[kind] = Values(
            home[stage],
            source[stage],
            born[there],
            times[:, there],
            unit % N if kind.per_slice else np.zeros_like(unit),
            on_host.get(kind.name, np.zeros(shape, bool))[there],
        )
    return live


def _of_later_slices(times: Ints, num_slices: int, writes: str) -> Ints:
    """Return [4 N, K, U] the times of actions that touch a carry, in its own and later slices.

    ``times`` [4, K, U] has the time of each action, -1 if it touches no carry. In the carry's own
    slice only the kinds of actions in ``writes`` touch it.
    """
    reader, part = np.arange(num_slices)[:, None], np.arange(num_slices)
    own = np.array([letter in writes for letter in KINDS])[:, None, None]
    does = (reader > part) | ((reader == part) & own)
    grid = times.reshape(*times.shape[:2], -1, num_slices, 1)
    touched = np.where(does[:, None, None], grid, -1)
    return np.moveaxis(touched, 3, 1).reshape(-1, *times.shape[1:])


def place(live: dict[ValueKind, Values], num_ranks: int) -> dict[ValueKind, Places]:
    """Give a place to every value; kinds of one pool share their places."""
    places: dict[ValueKind, Places] = {}
    for pool in dict.fromkeys(kind.pool for kind in live):
        kinds = [kind for kind in live if kind.pool == pool]
        sharing = joined(live[kind] for kind in kinds)
        number, counts = np.zeros(len(sharing.rank), np.int64), [0, 0]
        # Places on the device come first, then places in host memory, in one numbering.
        for memory, chosen in enumerate((~sharing.on_host, sharing.on_host)):
            of = sharing.chosen(chosen)
            counts[memory], colours = colour(of.rank, of.born, of.read, num_ranks)
            number[chosen] = memory * counts[0] + colours
        ends = np.cumsum([len(live[kind].rank) for kind in kinds])[:-1]
        for kind, part in zip(kinds, np.split(number, ends), strict=True):
            places[kind] = Places(part, *counts)
    return places


def joined(parts: Iterable[Values]) -> Values:
    """Concatenate the values of several kinds."""
    return Values(*(np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True)))


def colour(rank: Ints, born: Ints, read: Ints, num_ranks: int) -> tuple[int, Ints]:
    """Give values places that no other live value of the rank has; return count and [N] places.

    A value that is read for the last time in a slot makes room for a value that arrives at the end
    of that slot. A rank first uses as many new places as its peak number of values, and then reuses
    freed places in the order in which they were freed. The n-th value always finds a place, because
    at most peak - 1 of the values before it are still held.
    """
    if not len(rank):
        return 0, np.zeros(0, np.int64)
    # Sort arrivals and departures rank by rank; one key combines rank and time.
    stride = int(read.max()) + 2
    arrival, departure = rank * stride + born + 1, rank * stride + read + 1
    arriving = np.argsort(arrival, kind="stable")
    leaving = np.argsort(departure, kind="stable")
    first = np.searchsorted(rank[arriving], np.arange(num_ranks + 1))
    begin = first[rank[arriving]]
    nth = np.arange(len(rank)) - begin
    gone = np.searchsorted(departure[leaving], arrival[arriving], side="right") - begin
    # The largest number of values that a rank holds at once.
    peak = np.zeros(num_ranks, np.int64)
    np.maximum.at(peak, rank[arriving], nth + 1 - gone)
    # The first ``peak`` arrivals take new places. Arrival peak + i takes the place of departure i.
    behind = nth - peak[rank[arriving]]  # the departure whose place it takes, if not negative
    heir = behind >= 0
    before = np.arange(len(rank))  # the value whose place each value takes
    before[arriving[heir]] = leaving[(begin + behind)[heir]]
    # Trace each chain of reuse to its first value, whose number is the place.
    while (before != before[before]).any():
        before = before[before]
    place = np.empty_like(nth)
    place[arriving] = nth
    return int(peak.max()), place[before]
