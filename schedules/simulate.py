"""How long a schedule takes, under a clock of your choice. Letters as in `schedules.ir`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedules.check import check
from schedules.costs import Costs
from schedules.events import links, run
from schedules.flat import activations, flatten
from schedules.ir import KINDS, Schedule, ScheduleError
from schedules.lower import best_ticks
from schedules.ticks import PATTERNS, Ticks, spans

CLOCKS = ("event", "lockstep")


@dataclass(frozen=True)
class Report:
    """When everything runs, in the unit of the costs; time 0 is the start of the first action.

    Attributes:
      schedule: what was timed.
      costs: the durations.
      clock: "event" or "lockstep".
      pattern: the slots of a tick, "single" or "paired"; None under the event clock.
      makespan: the end of the last action.
      span: [S] from the start of a rank's first action to the end of its last.
      work: [S] the sum of a rank's durations.
      idle: [S] the waiting inside the span, span - work.
      bubble_rate: idle / span of the rank with the longest span.
      peak_activations: [S] the most stage inputs held at once, each from the start of its F to
        the end of its B or, split, of its W.
      starts: [S] tuples, aligned with ``schedule.orders``.
      ends: [S] tuples, likewise.
    """

    schedule: Schedule
    costs: Costs
    clock: str
    pattern: str | None
    makespan: float
    span: tuple[float, ...]
    work: tuple[float, ...]
    idle: tuple[float, ...]
    bubble_rate: float
    peak_activations: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    clock: str = "event",
    *,
    pattern: str | None = None,
) -> Report:
    """Time a schedule.

    Args:
      schedule: a legal schedule.
      costs: durations; by default F = I = W = 1 and messages are free.
      clock: "event": an action starts when its rank is free and its message is there, and
        sending occupies nobody. "lockstep": what `lower` makes of it, all ranks meet at the end
        of every slot, and an action starts with its slot.
      pattern: the slots of a lockstep tick, as in `lower`; by default the fastest.

    Raises:
      ScheduleError: an illegal schedule, an unknown clock, or a pattern that does not fit.
    """
    if clock not in CLOCKS:
        raise ScheduleError(
            f"clock={clock!r} is not a clock; choose one of {', '.join(map(repr, CLOCKS))}"
        )
    if clock == "event" and pattern is not None:
        raise ScheduleError(
            f"pattern={pattern!r} with clock='event': only the slots of a lockstep tick have a "
            f"pattern; leave it out, or choose clock='lockstep'"
        )
    check(schedule)
    costs = costs or Costs()
    if clock == "event":
        starts = _event_starts(schedule, costs)
    else:
        ticks = best_ticks(schedule, pattern, costs)
        pattern = next(name for name, slots in PATTERNS.items() if slots == ticks.pattern)
        starts = _lockstep_starts(ticks, costs)
    return _report(schedule, costs, clock, pattern, starts)


def _event_starts(schedule: Schedule, costs: Costs) -> Sequence[Sequence[float]]:
    flat = flatten(schedule)
    durations = {kind: costs.of(kind) for kind in KINDS}
    return run(schedule, flat, links(schedule, flat), durations=durations, comm=costs.comm)


def _lockstep_starts(ticks: Ticks, costs: Costs) -> Sequence[Sequence[float]]:
    begin = [start for start, _ in spans(ticks, costs)]
    return [[begin[time] for time in times] for times in ticks.times]


def _report(
    schedule: Schedule,
    costs: Costs,
    clock: str,
    pattern: str | None,
    starts: Sequence[Sequence[float]],
) -> Report:
    """Sum up what follows from the start times."""
    durations = {kind: costs.of(kind) for kind in KINDS}
    lasting = [[durations[kind] for _, kind, _ in order] for order in schedule.orders]
    ends = [
        [start + time for start, time in zip(*row, strict=True)]
        for row in zip(starts, lasting, strict=True)
    ]
    span = [last[-1] - first[0] for first, last in zip(starts, ends, strict=True)]
    work = list(map(sum, lasting))
    idle = [whole - part for whole, part in zip(span, work, strict=True)]
    longest = max(range(len(span)), key=span.__getitem__)
    return Report(
        schedule=schedule,
        costs=costs,
        clock=clock,
        pattern=pattern,
        makespan=max(times[-1] for times in ends),
        span=tuple(span),
        work=tuple(work),
        idle=tuple(idle),
        bubble_rate=idle[longest] / span[longest] if span[longest] else 0.0,
        peak_activations=tuple(int(activations(order).max()) for order in schedule.orders),
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
    )
