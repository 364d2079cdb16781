"""What a clock says of a schedule: when everything runs, and what follows from that.

Letters as in `schedules.ir`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from schedules.clocks.shared import Shared
from schedules.core.costs import Costs, Times
from schedules.core.flat import Flat, activations
from schedules.ir import Schedule

if TYPE_CHECKING:
    from schedules.clocks.explain import Explanation


@dataclass(frozen=True)
class Report:
    """When everything runs, in the unit of the costs; time 0 is the start of the first action.

    Attributes:
      schedule: what was timed.
      costs: the durations.
      clock: "event", "lockstep" or "measured".
      pattern: the slots of a lockstep tick, as in `lower`; None under the other clocks.
      partners: whether a lockstep exchange makes only those ranks meet that it joins.
      delayed: whether a lockstep exchange runs beside the work of the slot after its own.
      shared: which ends of the model all ranks share.
      makespan: the end of the last action, and of what ranks share.
      span: [S] from the start of a rank's first action to the end of its last; all of the step
        where ranks share work.
      work: [S] the sum of a rank's durations, and its part of what is shared.
      idle: [S] the waiting inside the span, span - work.
      bubble_rate: idle / span of the rank with the longest span. Ranks that start or end at
        different times wait outside of their spans, so 0 here is no promise for a step that ends
        in a synchronous optimiser: `step_bubble_rate` counts that waiting too.
      peak_activations: [S] the most stage inputs held at once, each from the start of its F to
        the end of its B or, split, of its W.
      starts: [S] tuples, aligned with ``schedule.orders``. The halves of a pair that overlaps
        (`Costs.pair`) share its time in proportion to what they take alone.
      ends: [S] tuples, likewise.
      common: when what the ranks share begins and ends, in order of time.
    """

    schedule: Schedule
    costs: Costs
    clock: str
    pattern: str | None
    partners: bool
    delayed: bool
    shared: Shared
    makespan: float
    span: tuple[float, ...]
    work: tuple[float, ...]
    idle: tuple[float, ...]
    bubble_rate: float
    peak_activations: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)
    common: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def step_time(self) -> float:
        """The makespan and the synchronous optimiser step after it."""
        return self.makespan + self.costs.optimizer

    @property
    def step_bubble_rate(self) -> float:
        """The share of all ranks' time, from 0 to the makespan, in which they do not work."""
        whole = self.makespan * len(self.work)
        return max(0.0, 1.0 - sum(self.work) / whole) if whole else 0.0

    @property
    def efficiency(self) -> float:
        """1 - step_bubble_rate."""
        return 1.0 - self.step_bubble_rate

    def explain(self) -> Explanation:
        """Every rank's waiting from 0 to the makespan, split by cause."""
        from schedules.clocks.explain import explain  # noqa: PLC0415  it imports this module

        return explain(self)


def sum_up(
    schedule: Schedule,
    costs: Costs,
    clock: str,
    slots: Mapping[str, Any],
    flat: Flat,
    starts: Times,
    lasting: Times,
    common: Times,
) -> Report:
    """Sum up what follows from the start times.

    Args:
      schedule: what was timed.
      costs: the durations.
      clock: which.
      slots: the fields of `Report` that say what lockstep is like.
      flat: the schedule's actions.
      starts: [A] when each starts.
      lasting: [A] how long it takes.
      common: [n, 2] when what ranks share begins and ends.
    """
    ends = starts + lasting
    cuts = flat.first[1:-1].tolist()
    begun, ended = ([part.tolist() for part in np.split(x, cuts)] for x in (starts, ends))
    span = [last[-1] - first[0] for first, last in zip(begun, ended, strict=True)]
    work = [float(part.sum()) for part in np.split(lasting, cuts)]
    makespan = float(max(ends.max(), common.max(initial=0.0)))
    if slots["shared"]:
        span = [makespan] * len(span)
        work = [part + _common(schedule, costs, slots["shared"]) for part in work]
    idle = [max(0.0, whole - part) for whole, part in zip(span, work, strict=True)]
    longest = max(range(len(span)), key=span.__getitem__)
    return Report(
        schedule=schedule,
        costs=costs,
        clock=clock,
        **slots,
        makespan=makespan,
        span=tuple(span),
        work=tuple(work),
        idle=tuple(idle),
        bubble_rate=idle[longest] / span[longest] if span[longest] else 0.0,
        peak_activations=tuple(int(held.max()) for held in activations(schedule)),
        starts=tuple(map(tuple, begun)),
        ends=tuple(map(tuple, ended)),
        common=tuple(map(tuple, common.tolist())),
    )


def _common(schedule: Schedule, costs: Costs, shared: Shared) -> float:
    """A rank's part of what all share in a step."""
    times = 1 if schedule.is_forward else 2  # an embedding and its gradient
    each = costs.head * ("head" in shared) + times * costs.embed * ("embed" in shared)
    return schedule.num_microbatches * each / schedule.num_ranks
