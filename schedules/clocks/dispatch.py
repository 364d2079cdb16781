"""One order of all actions and messages, in which processes call them without deadlock.

A message between two processes is a call that both make, and that ends for neither before both have
made it. So two processes that make the same calls in different orders may wait for each other for
ever. Letters as in `schedules.core.action`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.checks.check import check
from schedules.core.action import Action
from schedules.core.costs import Costs
from schedules.core.events import run
from schedules.core.flat import flatten
from schedules.core.messages import links
from schedules.orders.schedule import Schedule


class Call(NamedTuple):
    """An action, or the message that its end releases.

    Attributes:
      action: the action.
      rank: the rank that runs it.
      target: the rank to which its message goes; None where the call is the action.
    """

    action: Action
    rank: int
    target: int | None = None


def dispatch_order(schedule: Schedule) -> list[Call]:
    """All actions, and all messages between ranks, as they start under the event clock.

    Each process makes the calls of its ranks in this order. Take the first call that has not ended.
    Its data come from calls before it, which have ended; and its processes have made it, for all
    that they call before has ended. So it ends, and after it the next, whichever process holds
    which rank.

    Args:
      schedule: a legal schedule. An action lasts as long as by default in `simulate`, whatever was
        measured: all processes must find one order, and what they measure may differ.

    Raises:
      ScheduleError: an illegal schedule.
    """
    flat, wires = flatten(check(schedule)), links(schedule)
    sizes = schedule.num_stages, schedule.num_slices
    lasting = Costs().durations(flat.kind, flat.stage, flat.microbatch, sizes)
    starts = np.concatenate(run(schedule, durations=lasting))
    actions = [action for order in schedule.orders for action in order]
    ranks, targets = flat.rank.tolist(), wires.target.tolist()
    calls = [Call(*one) for one in zip(actions, ranks, strict=True)]
    sending = np.flatnonzero((wires.sent >= 0) & wires.crosses)
    calls += [Call(actions[n], ranks[n], targets[n]) for n in sending.tolist()]
    # A message comes before the actions that start when it is sent: one of them may wait for it.
    times = np.concatenate([starts, (starts + lasting)[sending]])
    is_action = np.arange(len(calls)) < len(actions)
    order = np.lexsort((is_action, times))
    return [calls[n] for n in order.tolist()]
