"""When each action runs in lockstep: ticks of a few slots, every slot ended by an exchange.

A message sent in one slot can be used in the next. Ranks meet in the exchange, all of them or
only those that it joins, so a slot lasts as long as the slowest action of those who meet.

Sends may be *delayed*: the exchange of a slot then runs beside the work of the next one, and its
messages can be used from the slot after that. Messages that stay on their rank are not. Letters as
in `schedules.ir`, A as in `schedules.flat`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedules.arguments import is_one_of, need
from schedules.capacity import see_that_slots_fit
from schedules.costs import Costs, Times
from schedules.flat import Ints, flatten
from schedules.ir import KINDS, Schedule, ScheduleError, shorten
from schedules.shared import Shared, lasting, together
from schedules.slots import Pattern, slot_times
from schedules.walk import follow

PATTERNS: dict[str, Pattern] = {
    "single": (("FBIW",),),
    "paired": (("F",), ("BIW",)),
    "unit": (("F",), ("BI",), ("W",)),
    "partner": (("FW", "BIW"), ("BIW", "FW")),
}


@dataclass(frozen=True, eq=False)
class Ticks:
    """A schedule laid out in slots.

    Attributes:
      schedule: what was laid out; no rank's order has changed.
      name: of its slot pattern.
      times: [A] the time of each action, counted in slots; time t is slot ``t % width`` of tick
        ``t // width``.
      delayed: messages to other ranks travel during the slot after their own.
    """

    schedule: Schedule
    name: str
    times: Ints
    delayed: bool = False

    @property
    def pattern(self) -> Pattern:
        """What each slot of a tick permits."""
        return PATTERNS[self.name]

    @property
    def width(self) -> int:
        """Slots per tick."""
        return len(self.pattern)

    @property
    def num_ticks(self) -> int:
        """T."""
        return int(self.times.max(initial=-1)) // self.width + 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that some rank may run in each slot."""
        return tuple("".join(k for k in KINDS if k in "".join(slot)) for slot in self.pattern)


def lay_out(schedule: Schedule, name: str, *, delayed: bool = False) -> Ticks:
    """Run every action in the first slot that permits its kind and has its message.

    On one rank nothing is delayed: no message leaves it.

    Raises:
      ScheduleError: the schedule deadlocks, or its slots need more memory than there is.
    """
    delayed &= schedule.num_ranks > 1
    times = slot_times(schedule, PATTERNS[name], delayed=delayed)
    ticks = Ticks(schedule, name, times, delayed)
    see_that_slots_fit(schedule, ticks.num_ticks * ticks.width)
    return ticks


def begins(ticks: Ticks, costs: Costs, *, partners: bool = False, shared: Shared = ()) -> Times:
    """[T * slots + 1, S] when each rank begins each slot, and when it has ended the last.

    A slot takes a rank as long as its action, then one exchange. Exchanges are static: one runs
    at every tick, along every edge that its slot needs at any tick, and takes as long as the
    slowest of them. Slots that no rank uses before an exchange cost only the exchange; ranks that
    no edge joins do not wait for each other if ``partners``, but for the work that they share: what
    all do before a slot is over when it begins, what they do after it precedes its exchange.

    Where sends are delayed a slot takes as long as its action or the exchange of the slot before,
    whichever is longer, and partners meet where it begins.

    Args:
      ticks: a layout.
      costs: durations.
      partners: an exchange makes only those ranks meet that it joins, not all.
      shared: which ends of the model all ranks share.
    """
    schedule, width, num_ranks = ticks.schedule, ticks.width, ticks.schedule.num_ranks
    flat, path = flatten(schedule), follow(schedule)
    count = ticks.num_ticks * width
    work = np.zeros((count, num_ranks))
    work[ticks.times, flat.rank] = costs.table(schedule.num_stages, shared)[flat.kind, flat.stage]
    before, after = lasting(together(schedule, ticks.times, count, shared), costs, num_ranks)
    joined = np.zeros((width, num_ranks, num_ranks), bool)  # slot, source, target
    target, leaves = path.target[path.crosses], ticks.times[path.crosses] + ticks.delayed
    joined[leaves % width, flat.rank[path.crosses], target] = True
    messages = costs.messages(num_ranks)
    exchange = np.where(joined, messages, 0.0)
    if not partners:
        last = exchange.max(axis=(1, 2), initial=0.0)[np.arange(count) % width]
        slowest = work.max(axis=1, initial=0.0)
        spans = after + (np.maximum(slowest, last) if ticks.delayed else slowest + last)
        found = np.concatenate([[0.0], np.cumsum(spans)])
        found += np.append(np.cumsum(before), before.sum())
        return np.repeat(found[:, None], num_ranks, axis=1)
    meets = joined | joined.transpose(0, 2, 1) | np.eye(num_ranks, dtype=bool)
    pays = np.maximum(exchange.max(axis=1), exchange.max(axis=2))
    neighbours = [_neighbours(slot) for slot in meets]
    result = np.zeros((count + 1, num_ranks))
    for time in range(count):
        slot = time % width
        if before[time]:
            result[time] = result[time].max() + before[time]
        ended = result[time] + work[time]
        if after[time]:
            ended[:] = ended.max() + after[time]
        met = (result[time] if ticks.delayed else ended)[neighbours[slot]].max(axis=0)
        result[time + 1] = np.maximum(ended, met + pays[slot])
    return result


def _neighbours(meets: Ints) -> Ints:
    """[most, S] the ranks that each rank meets, itself repeated where it meets fewer."""
    lists = [np.flatnonzero(row) for row in meets]
    most = max(map(len, lists))
    return np.stack([np.pad(row, (0, most - len(row)), mode="edge") for row in lists], axis=1)


def makespan(ticks: Ticks, costs: Costs, *, partners: bool = False, shared: Shared = ()) -> float:
    """When the last action ends, and what the ranks share after it."""
    flat, schedule = flatten(ticks.schedule), ticks.schedule
    begin = begins(ticks, costs, partners=partners, shared=shared)[ticks.times, flat.rank]
    end = begin + costs.table(schedule.num_stages, shared)[flat.kind, flat.stage]
    common = together(schedule, ticks.times, ticks.num_ticks * ticks.width, shared)
    _, after = lasting(common, costs, schedule.num_ranks)
    return float((end + after[ticks.times]).max(initial=0.0))


def exchanges(ticks: Ticks) -> int:
    """How many permutations of ranks run: all that a slot ever needs, at every tick."""
    path, ranks = follow(ticks.schedule), ticks.schedule.num_ranks
    slot = ticks.times[path.crosses] % ticks.width
    shift = (path.target - flatten(ticks.schedule).rank)[path.crosses] % ranks
    return ticks.num_ticks * len(np.unique(slot * ranks + shift))


def best_ticks(
    schedule: Schedule,
    pattern: str | None,
    costs: Costs,
    *,
    partners: bool = False,
    delayed: bool | None = False,
    shared: Shared = (),
) -> Ticks:
    """Lay the schedule out in the named pattern, or in the fastest; ties go to the simplest.

    Exchanges that the clock hides behind work still cost links and power: where sends are delayed,
    ties go to the fewest of them.

    Args:
      schedule: what is laid out.
      pattern: the slots of a tick, or None for the fastest.
      costs: durations.
      partners: an exchange makes only those ranks meet that it joins, not all.
      delayed: whether sends are; None for what is faster.
      shared: which ends of the model all ranks share.

    Raises:
      ScheduleError: no such pattern, or ``delayed`` is none of the three.
    """
    if pattern is not None:
        see_that_pattern_is_known(pattern)
    if delayed is not None:
        need("delayed", delayed, bool, "give True or False, or None for what is faster")
    choices = [
        (name, late)
        for late in ([False, True] if delayed is None else [delayed])
        for name in ([pattern] if pattern else _worth_trying(schedule, costs, partners, late))
    ]
    layouts = [lay_out(schedule, name, delayed=late) for name, late in choices]
    if len(layouts) == 1:
        return layouts[0]
    return min(
        layouts,
        key=lambda ticks: (
            makespan(ticks, costs, partners=partners, shared=shared),
            ticks.delayed and exchanges(ticks),
        ),
    )


def see_that_pattern_is_known(pattern: str) -> None:
    """See that there are ticks of this name.

    Raises:
      ScheduleError: there are none.
    """
    if not is_one_of(pattern, PATTERNS):
        raise ScheduleError(
            f"pattern={shorten(pattern)} is not a slot pattern; choose one of {sorted(PATTERNS)}, "
            f"or leave it out for the fastest"
        )


def _worth_trying(schedule: Schedule, costs: Costs, partners: bool, delayed: bool) -> list[str]:
    """Patterns that can be the fastest: W needs no slot where there is none of it.

    Where everybody meets, partner slots gain only if messages take time, of which each slot then
    carries a part, or if W can run beside what is longer, or if a rank waits for delayed messages.
    """
    kinds = {action.kind for order in schedule.orders for action in order}
    names = ["single"]
    if kinds - {"F"}:
        names.append("paired")
    if "W" in kinds:
        names.append("unit")
    if partners or delayed or "W" in kinds or costs.comm != 0:
        names.append("partner")
    return names
