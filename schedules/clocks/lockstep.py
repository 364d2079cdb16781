"""The lockstep clock: ranks meet in exchanges, so a slot lasts as long as its slowest action.

A slot takes a rank as long as its action, then one exchange. Exchanges are static: one runs at
every tick, along every edge that its slot needs at any tick, and takes as long as its slowest
message. Slots that no rank uses before an exchange cost only the exchange. Ranks that no edge joins
do not wait for each other, unless every exchange is a barrier, or the ranks share work.

Shared work before a slot ends when the slot begins; shared work after a slot precedes its exchange.
After a slot that never sends a message, such as a slot of W, no rank waits. Measurements show an
exception: if exchanges are barriers and delayed, ranks of virtual CPU devices meet in every slot.

With delayed sends a slot takes as long as its action or the exchange of the previous slot,
whichever is longer, and partners meet at the start of the slot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedules.clocks.shared import Shared, lasting, together
from schedules.clocks.ticks import Ticks, check_pattern, exchanges, lay_out
from schedules.core.arguments import need
from schedules.core.costs import Costs, Times
from schedules.core.events import action_times
from schedules.core.flat import Ints, Mask, flatten
from schedules.core.messages import links
from schedules.core.schedule import Schedule
from schedules.core.timetable import kinds_in


class Slots(NamedTuple):
    """Start times of slots on each rank, and of the work that all ranks share.

    Attributes:
      begins: [T * slots + 1, S] the start of each slot on each rank, and the end of the last slot.
      before: [T * slots] the start of the work that all ranks share before a slot.
      after: [T * slots] the start of the work that all ranks share after a slot.
    """

    begins: Times
    before: Times
    after: Times


@dataclass(frozen=True, eq=False)
class Lockstep:
    """A layout timed by the lockstep clock.

    Attributes:
      partners: whether only the ranks that an exchange joins meet in it, not all ranks.
      shared: the ends of the model that all ranks share.
      copies: [A] whether an action copies a value over the host link; None if no action does.
    """

    ticks: Ticks
    costs: Costs
    partners: bool = False
    shared: Shared = ()
    copies: Mask | None = None

    @functools.cached_property
    def starts(self) -> Times:
        begins: Times = self._slots.begins[self.ticks.times, flatten(self.ticks.schedule).rank]
        return begins

    @functools.cached_property
    def makespan(self) -> float:
        """The end of the last action, and of the shared work after it."""
        end = (self.starts + self._lasting).max(initial=0.0)
        return float(max(end, self.common[:, 1].max(initial=0.0)))

    @functools.cached_property
    def common(self) -> Times:
        """[n, 2] start and end of the ranks' shared work, in order of time."""
        before, after = self.sharing
        spans = [
            np.stack([start[length > 0], (start + length)[length > 0]], axis=1)
            for start, length in ((self._slots.before, before), (self._slots.after, after))
        ]
        both = np.concatenate(spans)
        return both[np.argsort(both[:, 0], kind="stable")]

    @functools.cached_property
    def sharing(self) -> tuple[Times, Times]:
        """[T * slots] durations of the ranks' shared work before each slot, and after each slot."""
        ticks, schedule = self.ticks, self.ticks.schedule
        work = together(schedule, ticks.times, ticks.num_ticks * ticks.width, self.shared)
        return lasting(work, self.costs, schedule.num_ranks, schedule.num_slices)

    @functools.cached_property
    def _lasting(self) -> Times:
        return action_times(self.ticks.schedule, self.costs, self.shared, self.copies)

    @functools.cached_property
    def _slots(self) -> Slots:
        ticks, schedule = self.ticks, self.ticks.schedule
        flat, num_ranks = flatten(schedule), schedule.num_ranks
        work = np.zeros((ticks.num_ticks * ticks.width, num_ranks))
        work[ticks.times, flat.rank] = self._lasting
        joined = _joined(ticks)
        each = self.costs.per_slice(schedule.num_slices)
        exchange = np.where(joined, each.messages(num_ranks), 0.0)
        if not self.partners:
            joined, exchange = among_all(joined, exchange)
            if joined.all() or ticks.delayed or num_ranks == 1:
                return self._slot_by_slot(work, exchange[:, 0, 0])
        return among_partners(work, joined, exchange, self.sharing, delayed=ticks.delayed)

    def _slot_by_slot(self, work: Times, exchange: Times) -> Slots:
        """Compute slots if all ranks meet in every slot, in an exchange of [slots] durations."""
        (before, after), (count, num_ranks) = self.sharing, work.shape
        last = exchange[np.arange(count) % self.ticks.width]
        busy = work.max(axis=1, initial=0.0) + after
        spans = np.maximum(busy, last) if self.ticks.delayed else busy + last
        starts = np.concatenate([[0.0], np.cumsum(spans)])
        starts += np.append(np.cumsum(before), before.sum())
        begins = np.repeat(starts[:, None], num_ranks, axis=1)
        return Slots(begins, starts[:-1] - before, starts[:-1] + busy - after)


def among_all(joined: Mask, exchange: Times) -> tuple[Mask, Times]:
    """Treat every exchange as a barrier: all ranks wait for the longest exchange.

    `among_partners` explains the arguments.
    """
    meets = np.logical_or.reduce(joined, axis=(1, 2), keepdims=True)
    lasts = np.maximum.reduce(exchange, axis=(1, 2), keepdims=True)
    return np.broadcast_to(meets, joined.shape), np.broadcast_to(lasts, joined.shape)


def among_partners(
    work: Times, joined: Mask, exchange: Times, sharing: tuple[Times, Times], *, delayed: bool
) -> Slots:
    """Compute start times of slots if an exchange joins only some of the ranks.

    Args:
      work: [T * slots, S] the duration of each rank's work in each slot.
      joined: [slots, S, S] whether a source ever sends to a target in a slot of a tick.
      exchange: [slots, S, S] the duration of this message, 0 without a message.
      sharing: [T * slots] durations of the ranks' shared work before and after each slot.
      delayed: whether an exchange runs during the work of its slot, not after it.
    """
    before, after = (column.tolist() for column in sharing)
    count, num_ranks = work.shape
    meets = joined | joined.transpose(0, 2, 1) | np.eye(num_ranks, dtype=bool)
    pays = np.maximum(exchange.max(axis=1), exchange.max(axis=2))
    neighbours = [_neighbours(slot) for slot in meets]
    result, first, second = np.zeros((count + 1, num_ranks)), np.zeros(count), np.zeros(count)
    for time in range(count):
        slot = time % len(joined)
        if before[time]:
            first[time] = result[time].max()
            result[time] = first[time] + before[time]
        begun = result[time]
        ended = begun + work[time]
        if after[time]:
            second[time] = ended.max()
            ended[:] = second[time] + after[time]
        met = (begun if delayed else ended)[neighbours[slot]].max(axis=0)
        np.maximum(ended, met + pays[slot], out=result[time + 1])
    return Slots(result, first, second)


def _joined(ticks: Ticks) -> Mask:
    """Mark [slots, S, S] whether a source ever sends to a target in a slot's exchange."""
    path, num_ranks = links(ticks.schedule), ticks.schedule.num_ranks
    joined = np.zeros((ticks.width, num_ranks, num_ranks), bool)
    source, target = flatten(ticks.schedule).rank[path.crosses], path.target[path.crosses]
    leaves = ticks.times[path.crosses] + ticks.delayed
    joined[leaves % ticks.width, source, target] = True
    return joined


def _neighbours(meets: Mask) -> Ints:
    """Return [most, S] the ranks that each rank meets; the rank itself fills empty entries."""
    lists = [np.flatnonzero(row) for row in meets]
    most = max(map(len, lists))
    return np.stack([np.pad(row, (0, most - len(row)), mode="edge") for row in lists], axis=1)


def fastest(
    schedule: Schedule,
    pattern: str | None,
    costs: Costs,
    *,
    partners: bool = False,
    delayed: bool | None = False,
    shared: Shared = (),
    copies: Mask | None = None,
) -> Lockstep:
    """Lay the schedule out in the named pattern, or in the fastest; ties go to the simplest.

    Exchanges that the clock hides behind work still cost links and power. So with delayed sends,
    ties go to the layout with the fewest exchanges.

    Raises:
      ScheduleError: there is no such pattern, or ``delayed`` is none of the three.
    """
    if pattern is not None:
        check_pattern(pattern)
    if delayed is not None:
        need("delayed", delayed, bool, "give True or False, or None for what is faster")
    choices = [
        (name, late)
        for late in ([False, True] if delayed is None else [delayed])
        for name in ([pattern] if pattern else _worth_trying(schedule, costs, partners, late))
    ]
    layouts = [
        Lockstep(lay_out(schedule, name, delayed=late), costs, partners, shared, copies)
        for name, late in choices
    ]
    if len(layouts) == 1:
        return layouts[0]

    def cost(of: Lockstep) -> tuple[float, int]:
        # Rounded, so that the order of a sum decides no tie.
        return float(f"{of.makespan:.12g}"), of.ticks.delayed and exchanges(of.ticks)

    return min(layouts, key=cost)


def _worth_trying(schedule: Schedule, costs: Costs, partners: bool, delayed: bool) -> list[str]:
    """List patterns that can be the fastest; schedules without W need no slot for W.

    Partner slots may also gain if messages take time, because each slot carries a part of them, or
    if W can run during a longer action.
    """
    kinds = kinds_in(schedule)
    names = ["single"]
    if not schedule.is_forward:
        names.append("paired")
    if "W" in kinds:
        names.append("unit")
    if may_differ(schedule.num_ranks, partners, delayed) or "W" in kinds or costs.comm != 0:
        names.append("partner")
    return names


def may_differ(num_ranks: int, partners: bool, delayed: bool) -> bool:
    """Tell whether slots that permit ranks different kinds can gain, for any costs of actions.

    With barriers and without delayed messages only two ranks can gain, because they exchange in
    only one of two slots.
    """
    return partners or delayed or num_ranks == 2
