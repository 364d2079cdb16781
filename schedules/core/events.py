"""The event clock: a rank waits only for its data, and sending does not occupy it.

Messages have the numbers of `schedules.core.messages`. A step is the unit that the clock runs: an
action or, in an overlapped pair, a part of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedules.core.costs import Costs, Times
from schedules.core.flat import Flat, Ints, Mask, flatten
from schedules.core.messages import links
from schedules.core.timetable import Timetable


def action_times(
    schedule: Timetable, costs: Costs, shared: Sequence[str] = (), copies: Mask | None = None
) -> Times:
    """Compute [A] durations of a schedule's actions."""
    flat, sizes = flatten(schedule), (schedule.num_stages, schedule.num_slices)
    return costs.durations(flat.kind, flat.stage, flat.microbatch, sizes, shared, copies)


def message_times(schedule: Timetable, costs: Costs) -> Times:
    """Compute [A] durations of the messages that a schedule's actions send."""
    source, target = flatten(schedule).rank, links(schedule).target
    return costs.per_slice(schedule.num_slices).lags(source, target, schedule.num_ranks)


class Steps(NamedTuple):
    """All steps, rank 0's first.

    Attributes:
      first: [S + 1] index of each rank's first step, then the number of all steps.
      awaited: the message that the step needs to start, -1 for none.
      sent: the message that the step's end releases, -1 for none.
      cost: the step's duration.
      lag: the duration of the step's message.
    """

    first: Ints
    awaited: Ints
    sent: Ints
    cost: Times
    lag: Times


def run(
    schedule: Timetable,
    *,
    durations: Times | None = None,
    lag: Times | None = None,
    pair: float | None = None,
) -> list[Times]:
    """Compute [S] arrays of start times; an array ends early if its rank waits forever.

    Args:
      schedule: a legal or illegal schedule for which `is_dense` holds.
      durations: [A] the duration of each action; 1 by default.
      lag: [A] the duration of the message that each action sends; 0 by default.
      pair: the duration of an overlapped pair: its two actions start when both messages have
        arrived, and send when both have ended. By default they run one after the other.
    """
    flat, wires = flatten(schedule), links(schedule)
    cost = np.ones(len(flat.kind)) if durations is None else durations
    delay = np.zeros(len(flat.kind)) if lag is None else lag
    steps = Steps(flat.first, wires.awaited, wires.sent, cost, delay)
    if pair is None or not flat.pair.any():
        return _rows(steps)
    return _paired_rows(flat, steps, pair)


def _paired_rows(flat: Flat, steps: Steps, pair: float) -> list[Times]:
    """Compute start times if the two actions of each pair overlap.

    Such a pair becomes three steps: wait for the first message; wait for the second, take the
    duration of the pair and send the second message; send the first.
    """
    opening = np.flatnonzero(flat.pair)
    third = np.insert(np.zeros(len(flat.kind), bool), opening + 2, True)
    step = np.flatnonzero(~third)  # [A] the step of each action
    empty = (-1, -1, 0.0, 0.0)
    awaited, sent, cost, lag = (np.full(len(third), fill) for fill in empty)
    for column, values in zip((awaited, sent, cost, lag), steps[1:], strict=True):
        column[step] = values
    first = step[opening]
    sent[first + 2], lag[first + 2] = sent[first], lag[first]
    sent[first], cost[first], cost[first + 1] = -1, 0.0, pair
    bounds = flat.first + np.searchsorted(opening + 2, flat.first, side="right")
    rows = _rows(Steps(bounds, awaited, sent, cost, lag))
    step[opening] += 1  # both start when the second message has arrived too
    shown = [part - at for part, at in zip(flat.by_rank(step), bounds, strict=False)]
    return [row[n[n < len(row)]] for row, n in zip(rows, shown, strict=True)]


def _rows(steps: Steps) -> list[Times]:
    """Split start times by rank: [S] starts of the steps that each rank can run."""
    rows = np.split(starts_of(steps), steps.first[1:-1])
    return [row[: np.count_nonzero(row >= 0)] for row in rows]


def starts_of(steps: Steps) -> Times:
    """Compute the start of each step, -1 for a step that never starts."""
    first, awaited, sent, cost, lag = (column.tolist() for column in steps)
    orders = [range(begin, end) for begin, end in itertools.pairwise(first)]
    messages = 1 + int(max(steps.awaited.max(initial=-1), steps.sent.max(initial=-1)))
    starts, _ = visit(orders, awaited, sent, cost, lag, messages)
    return np.array(starts, np.float64)


def visit(
    orders: Sequence[Sequence[int]],
    awaited: Sequence[int],
    sent: Sequence[int],
    cost: Sequence[float],
    lag: Sequence[float],
    num_messages: int,
) -> tuple[list[float], list[float]]:
    """Compute the start of each step, -1 if it never starts, and [S] the end of each rank.

    ``orders`` has the numbers of each rank's steps, `Steps` explains the other columns, and every
    message is less than ``num_messages``. Ranks run in turn, each as far as it can. If a message is
    sent twice, which no legal schedule does, the first send counts.
    """
    arrival = [-1.0] * num_messages
    starts = [-1.0] * len(awaited)
    waiting = [-1] * num_messages  # the last rank that began to wait for each message
    behind = [-1] * len(orders)  # for each rank, the rank that waited for its message before it
    position, free = [0] * len(orders), [0.0] * len(orders)
    todo = list(range(len(orders)))
    while todo:
        rank = todo.pop()
        order, now = orders[rank], free[rank]
        n, size = position[rank], len(orders[rank])
        while n < size:
            step = order[n]
            message = awaited[step]
            if message >= 0:
                there = arrival[message]
                if there < 0.0:
                    behind[rank], waiting[message] = waiting[message], rank
                    break
                if there > now:  # noqa: PLR1730  a call of max() takes longer than the rest
                    now = there
            starts[step] = now
            now += cost[step]
            message = sent[step]
            if message >= 0 and arrival[message] < 0.0:
                arrival[message] = now + lag[step]
                other = waiting[message]
                while other >= 0:
                    todo.append(other)
                    other = behind[other]
            n += 1
        position[rank], free[rank] = n, now
    return starts, free
