"""Simulation of a schedule under a chosen clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from schedules.clocks.hosted import Keep, Offload, check_keep, check_offload, moves
from schedules.clocks.lockstep import fastest
from schedules.clocks.meetings import meet
from schedules.clocks.report import Report, sum_up
from schedules.clocks.shared import parts
from schedules.core.action import Action, ScheduleError, shorten
from schedules.core.arguments import check_duration, is_one_of, need
from schedules.core.check import check
from schedules.core.costs import Costs, Times, of_unit_length_by_default
from schedules.core.events import action_times, message_times, run
from schedules.core.flat import Flat, flatten
from schedules.core.schedule import Schedule
from schedules.core.timetable import actions_of

CLOCKS = ("event", "lockstep", "measured")


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    clock: str = "event",
    *,
    pattern: str | None = None,
    partners: bool = False,
    delayed: bool | None = False,
    durations: Mapping[Action, float] | None = None,
    shared: Iterable[str] = (),
    offload: Offload = None,
    keep: Keep = "input",
) -> Report:
    """Time a schedule.

    Args:
      schedule: a legal schedule.
      costs: durations; by default F = I = W = 1 and messages are free.
      clock: "event": an action starts when its rank is free and its message has arrived; sending
        occupies no rank. "lockstep": ranks run the slots of `lower`, meet at the end of every slot
        that sends, and start an action with its slot. "measured": the event clock with a duration
        for each action, from a run.
      pattern: the slots of a lockstep tick, an option of `lower`; by default the fastest.
      partners: under lockstep, whether an exchange synchronizes only its sender and receiver
        (processes, GPUs and TPUs), or all ranks (virtual CPU devices of one process).
      delayed: under lockstep, the option of `lower`: whether an exchange runs during the work of
        the next slot; None for the faster choice. On one rank no message is delayed.
      durations: for "measured", the duration of each action; ``costs`` give the durations of
        messages and the optimiser.
      shared: the parts of "embed" and "head" that are split by vocabulary over all ranks. Each rank
        does 1/S of the work for every microbatch, when all ranks meet. In lockstep that is before
        or after a slot. Under the other clocks it is at the same place in the order of each rank,
        as soon as the last rank has arrived; halves of a pair do not overlap then. By default the
        first rank runs embed and the last rank runs head.
      offload: the values in host memory, an option of `lower`: actions that write or read them
        include `Costs.host`. The durations of a measured clock already include this time.
      keep: the values that F keeps for its backward, an option of `lower`; used to choose the
        offloaded values.

    Raises:
      ScheduleError: an illegal schedule, an unknown clock, or an argument that does not fit it.
    """
    check_arguments(clock, pattern, partners, delayed, durations)
    shared = parts(shared)
    check(schedule)
    costs, flat = of_unit_length_by_default(costs), flatten(schedule)
    copies = moves(schedule, check_keep(keep), check_offload(offload), shared)
    if durations is None:
        lasting = action_times(schedule, costs, shared, copies)
    else:
        lasting = _measured(schedule, durations)
    common = np.zeros((0, 2))
    if clock == "lockstep" or shared:
        sends: dict[str, Any] = {"partners": partners, "delayed": delayed}
        best = fastest(schedule, pattern, costs, **sends, shared=shared, copies=copies)
    if clock == "lockstep":
        pattern, delayed = best.ticks.name, best.ticks.delayed
        starts, common = best.starts, best.common
    elif shared:
        starts, common = meet(best, lasting)
    else:
        pair = costs.pair if clock == "event" else None  # measured durations include the overlap
        rows = run(schedule, durations=lasting, lag=message_times(schedule, costs), pair=pair)
        starts = np.concatenate(rows)
        if pair is not None:
            _share(flat, pair, starts, lasting)
    slots: dict[str, Any] = {"pattern": pattern, "partners": partners, "shared": shared}
    slots["delayed"] = bool(delayed)
    if copies.any():
        slots["moved"] = tuple(tuple(row.tolist()) for row in flat.by_rank(copies))
    return sum_up(schedule, costs, clock, slots, flat, starts, lasting, common)


def _share(flat: Flat, pair: float, starts: Times, lasting: Times) -> None:
    """Show the halves of overlapped pairs one after the other, in proportion to their durations."""
    first = np.flatnonzero(flat.pair)
    alone = lasting[first] + lasting[first + 1]
    lasting[first] *= np.divide(pair, alone, out=np.ones_like(alone), where=alone > 0)
    lasting[first + 1] = pair - lasting[first]
    starts[first + 1] = starts[first] + lasting[first]


def check_arguments(
    clock: str,
    pattern: str | None,
    partners: bool,
    delayed: bool | None,
    durations: Mapping[Action, float] | None,
) -> None:
    """Check the clock, and the arguments of `simulate` that depend on it."""
    need("partners", partners, bool, "give True or False")
    if not is_one_of(clock, CLOCKS):
        raise ScheduleError(
            f"clock={shorten(clock)} is not a clock; choose one of {', '.join(map(repr, CLOCKS))}"
        )
    slots = {"pattern": (pattern, None), "partners": (partners, False), "delayed": (delayed, False)}
    named = [f"{k}={shorten(value)}" for k, (value, unset) in slots.items() if value is not unset]
    if clock != "lockstep" and named:
        raise ScheduleError(
            f"{named[0]} with clock={clock!r}: only lockstep ticks have slots that end in "
            f"exchanges; leave it out, or choose clock='lockstep'"
        )
    if durations is not None:
        need("durations", durations, Mapping, "give {action: time} for every action, from a run")
    if (clock == "measured") != (durations is not None):
        raise ScheduleError(
            f"clock={clock!r} with{'out' if durations is None else ''} durations: the measured "
            f"clock, and no other, takes the time of every action from a run; give "
            f"durations={{action: time}} and clock='measured', or neither"
        )


def _measured(schedule: Schedule, measured: Mapping[Action, float]) -> Times:
    actions = actions_of(schedule)
    missing = [action for action in actions if action not in measured]
    if missing:
        raise ScheduleError(
            f"durations has no time for {missing[0]} ({len(missing)} of {len(actions)} actions "
            f"are missing): the measured clock needs one for each; give {{action: time}} for all"
        )
    times = [measured[action] for action in actions]
    for action, time in zip(actions, times, strict=True):
        check_duration(f"durations[{action}]={shorten(time)}", time)
    return np.array(times, np.float64)
