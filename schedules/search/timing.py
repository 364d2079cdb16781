"""Durations of orders: the results of `simulate`, fast enough for thousands of calls.

The only check is for ranks that wait for each other in a cycle: their time is infinite. C is the
number of codes of actions (`schedules.search.problem`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.clocks.lockstep import among_all, among_partners, may_differ
from schedules.clocks.ticks import PATTERNS, Pattern, fill, wait
from schedules.core.action import KINDS
from schedules.core.costs import Times
from schedules.core.events import visit
from schedules.core.flat import Ints
from schedules.search.problem import Orders, Problem


@dataclass(frozen=True, eq=False)
class Timer:
    """A clock for the orders of one problem.

    Attributes:
      pattern: the slots of a lockstep tick; None for the event clock.
      waits: [width][C] from each slot of a tick, the number of slots until the next one that
        permits the action.
      partners: whether an exchange synchronizes only its sender and receiver, not all ranks.
      delayed: whether an exchange runs during the work of the slot after its own.
    """

    problem: Problem
    pattern: str | None
    waits: list[list[int]]
    partners: bool = False
    delayed: bool = False

    def __call__(self, orders: Orders) -> tuple[float, Sequence[float]]:
        """Return the makespan, and [C] the start of each action: a time or, in lockstep, a slot."""
        problem = self.problem
        count = 2 * problem.num_stages * problem.num_microbatches
        if self.pattern is None:
            starts, ended = visit(
                orders, problem.awaited, problem.sent, problem.durations, problem.lag, count
            )
            return (math.inf if _is_stuck(orders, starts) else max(ended)), starts
        times, work = fill(
            orders,
            problem.awaited,
            problem.sent,
            self.waits,
            self.late,
            problem.durations,
            count,
        )
        if _is_stuck(orders, times):
            return math.inf, times
        if self.partners or not (self.delayed or self._meets_in_every_slot(times)):
            return self._rank_by_rank(orders, times), times
        return _slot_by_slot(work, self._exchanges(times), self.delayed), times

    def _meets_in_every_slot(self, times: Sequence[int]) -> bool:
        """Tell whether an exchange follows every slot of a tick."""
        width, slots = len(self.waits), set()
        for code in self._crossing:
            if times[code] >= 0:
                slots.add(times[code] % width)
                if len(slots) == width:
                    return True
        return False

    def _rank_by_rank(self, orders: Orders, times: Sequence[int]) -> float:
        """Compute the makespan if not all ranks meet in every slot."""
        num_ranks, (durations, reader, lag) = len(orders), self._columns
        rank = np.repeat(np.arange(num_ranks), [len(order) for order in orders])
        codes = np.fromiter(itertools.chain.from_iterable(orders), np.int64, len(rank))
        time = np.fromiter(map(times.__getitem__, codes.tolist()), np.int64, len(rank))
        work = np.zeros((1 + time.max(), num_ranks))
        work[time, rank] = durations[codes]
        shape = len(self.waits), num_ranks, num_ranks
        joined, exchange = np.zeros(shape, bool), np.zeros(shape)
        crosses = (reader[codes] >= 0) & (reader[codes] != rank)
        slot = (time[crosses] + self.delayed) % len(self.waits)
        edges = slot, rank[crosses], reader[codes[crosses]]
        joined[edges], exchange[edges] = True, lag[codes[crosses]]
        nothing = np.zeros(len(work))
        sharing = nothing, nothing
        if not self.partners:
            joined, exchange = among_all(joined, exchange)
        begins = among_partners(work, joined, exchange, sharing, delayed=self.delayed).begins
        return float((begins[time, rank] + durations[codes]).max())

    @functools.cached_property
    def _columns(self) -> tuple[Times, Ints, Times]:
        """The durations, readers and lags as arrays, each [C]."""
        problem = self.problem
        return np.array(problem.durations), np.array(problem.reader), np.array(problem.lag)

    def _exchanges(self, times: Sequence[int]) -> list[float]:
        """Return [width] the duration of the longest message of each slot of a tick."""
        width, late = len(self.waits), self.late
        longest, most, full = [0.0] * width, max(self.problem.lag), 0
        for code, lag in self._lasting_messages:
            slot = (times[code] + late[code]) % width
            if lag > longest[slot] and times[code] >= 0:
                longest[slot] = lag
                full += lag == most
                if full == width:  # no other can be longer
                    break
        return longest

    @functools.cached_property
    def _lasting_messages(self) -> list[tuple[int, float]]:
        """The codes of the actions whose messages take time, each with that time."""
        return [(code, lag) for code, lag in enumerate(self.problem.lag) if lag > 0.0]

    @functools.cached_property
    def late(self) -> list[bool]:
        """[C] flags of the actions whose message is sent during the next slot."""
        return [self.delayed and crosses for crosses in self._crosses]

    @functools.cached_property
    def _crossing(self) -> list[int]:
        """The codes of the actions that send to another rank."""
        return [code for code, crosses in enumerate(self._crosses) if crosses]

    @functools.cached_property
    def _crosses(self) -> list[bool]:
        """[C] flags of the actions that send to another rank."""
        each = self.problem.num_microbatches
        home = [rank for _ in KINDS for rank in self.problem.placement for _ in range(each)]
        return [to not in (-1, at) for to, at in zip(self.problem.reader, home, strict=True)]


def timers(
    problem: Problem,
    clock: str,
    only: str | None = None,
    *,
    partners: bool = False,
    delayed: bool | None = False,
) -> list[Timer]:
    """Make one timer for the event clock, or in lockstep one for each pattern.

    In lockstep, ``only`` selects one pattern, and ``delayed=None`` gives timers without delays and
    with them. Patterns whose slots differ from rank to rank are left out if they rarely gain.
    """
    if clock == "event":
        return [Timer(problem, None, [])]
    timers: list[Timer] = []
    for late in [False, True] if delayed is None else [delayed]:
        differ = may_differ(problem.num_ranks, partners, late)
        timers += [
            Timer(problem, name, _waits(problem, pattern), partners, late)
            for name, pattern in PATTERNS.items()
            if (name == only if only else differ or all(len(slot) == 1 for slot in pattern))
        ]
    return timers


def _waits(problem: Problem, pattern: Pattern) -> list[list[int]]:
    """Return [width][C] the number of slots from each slot to the next that permits an action."""
    waits = wait(pattern)
    ranks = np.array(problem.placement) % waits.shape[-1]
    rows: list[list[int]] = (
        waits[:, :, ranks].repeat(problem.num_microbatches, -1).reshape(len(pattern), -1).tolist()
    )
    return rows


def _is_stuck(orders: Orders, times: Sequence[float]) -> bool:
    """Tell whether some rank's last action never runs, and so whether the orders deadlock."""
    return any(times[order[-1]] < 0 for order in orders if order)


def _slot_by_slot(work: list[float], exchange: list[float], delayed: bool) -> float:
    """Compute the makespan if all ranks meet in every slot, without the last slot's exchange."""
    width, last = len(exchange), len(work) - 1
    if delayed:
        return sum(max(w, exchange[slot % width]) for slot, w in enumerate(work[:-1])) + work[-1]
    rounds, rest = divmod(len(work), width)
    return sum(work) + sum(exchange) * rounds + sum(exchange[:rest]) - exchange[last % width]
