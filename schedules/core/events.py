"""The event clock: a rank waits only for its data, and sending does not occupy it.

It shares no code with `schedules.core.walk`, so that `check` is a second opinion on what `lower`
does. Letters as in `schedules.core.action`, A as in `schedules.core.flat`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from schedules.core.costs import Times
from schedules.core.flat import B, F, Flat, I, Ints, breadth
from schedules.core.timetable import Timetable

MANY = 24  # ranks that work at a time; from here on it is quicker to let all step together


class Links(NamedTuple):
    """Who waits for what. A message is a number, -1 is none.

    Attributes:
      awaited: [A] the message that an action cannot start without.
      sent: [A] the message that its end releases.
      target: [A] the rank that the message goes to; its own where it sends none.
    """

    awaited: Ints
    sent: Ints
    target: Ints


def links(schedule: Timetable, flat: Flat) -> Links:
    """Outputs go to the next stage, gradients to the one before; 2km and 2km + 1 number them."""
    last, num_microbatches = schedule.num_stages - 1, schedule.num_microbatches
    index = flat.stage * num_microbatches + flat.microbatch
    forward = flat.in_range & (flat.kind == F)
    gradient = flat.in_range & ((flat.kind == B) | (flat.kind == I))
    above, below = index + num_microbatches, index - num_microbatches
    awaited = np.where(forward & (flat.stage > 0), 2 * below, -1)
    awaited = np.where(gradient & (flat.stage < last), 2 * above + 1, awaited)
    sent = np.where(forward & (flat.stage < last), 2 * index, -1)
    sent = np.where(gradient & (flat.stage > 0), 2 * index + 1, sent)
    neighbour = np.clip(flat.stage + np.where(forward, 1, -1), 0, last)
    there = np.array(schedule.placement, np.int64)[neighbour]
    return Links(awaited, sent, np.where(sent < 0, flat.rank, there))


class Steps(NamedTuple):
    """What the clock runs: the actions or, where a pair overlaps, parts of them.

    Attributes:
      first: [S + 1] index of each rank's first step, then their number.
      awaited: as in `Links`, of each step.
      sent: likewise.
      cost: how long it takes.
      lag: how long its message is on its way.
    """

    first: Ints
    awaited: Ints
    sent: Ints
    cost: Times
    lag: Times


Clock = Callable[[Steps, int], Times]  # from steps and the number of messages to starts, or -1


def run(
    schedule: Timetable,
    flat: Flat,
    wires: Links,
    *,
    durations: Times | None = None,
    lag: Times | None = None,
    pair: float | None = None,
) -> list[Times]:
    """[S] arrays of start times; one shorter than its order stops where the rank waits forever.

    Args:
      schedule: legal or not, but `is_dense`.
      flat: its actions.
      wires: its messages.
      durations: [A] how long each action takes; 1 by default.
      lag: [A] how long the message is on its way that each action sends; 0 by default.
      pair: how long the two actions of an overlapped pair take together: they start when both
        messages are there, and send when both end. By default they run one after the other.
    """
    cost = np.ones(len(flat.kind)) if durations is None else durations
    delay = np.zeros(len(flat.kind)) if lag is None else lag
    steps = Steps(flat.first, wires.awaited, wires.sent, cost, delay)
    num_messages = 2 * schedule.num_stages * schedule.num_microbatches
    if pair is None or not flat.pair.any():
        return _starts(clock(schedule), steps, num_messages)
    return _paired_starts(clock(schedule), flat, steps, num_messages, pair)


def clock(schedule: Timetable) -> Clock:
    """What is quick for as many ranks as work at a time."""
    return _sweep if breadth(schedule) >= MANY else _visit


def _paired_starts(
    start: Clock, flat: Flat, steps: Steps, num_messages: int, pair: float
) -> list[Times]:
    """Start times where each action that opens a pair overlaps with the one after it.

    Such a pair is three steps: wait for the first message; wait for the second, take the time
    of both and send the second message; send the first.
    """
    opening = np.flatnonzero(flat.pair)
    third = np.insert(np.zeros(len(flat.kind), bool), opening + 2, True)
    step = np.flatnonzero(~third)  # [A] of each action
    empty = (-1, -1, 0.0, 0.0)
    awaited, sent, cost, lag = (np.full(len(third), fill) for fill in empty)
    for column, values in zip((awaited, sent, cost, lag), steps[1:], strict=True):
        column[step] = values
    first = step[opening]
    sent[first + 2], lag[first + 2] = sent[first], lag[first]
    sent[first], cost[first], cost[first + 1] = -1, 0.0, pair
    bounds = flat.first + np.searchsorted(opening + 2, flat.first, side="right")
    rows = _starts(start, Steps(bounds, awaited, sent, cost, lag), num_messages)
    step[opening] += 1  # both start when the second message is there too
    shown = [part - at for part, at in zip(np.split(step, flat.first[1:-1]), bounds, strict=False)]
    return [row[n[n < len(row)]] for row, n in zip(rows, shown, strict=True)]


def _starts(start: Clock, steps: Steps, num_messages: int) -> list[Times]:
    """[S] starts of the steps of each rank, of as many as it can run."""
    rows = np.split(start(steps, num_messages), steps.first[1:-1])
    return [row[: np.count_nonzero(row >= 0)] for row in rows]


def _visit(steps: Steps, num_messages: int) -> Times:
    """The start of each step, -1 where it never does: rank by rank, as far as each can go."""
    first, awaited, sent, cost, lag = (column.tolist() for column in steps)
    arrival = [-1.0] * num_messages
    waiting: dict[int, list[int]] = {}
    starts = [-1.0] * len(awaited)
    position, free = first[:-1], [0.0] * (len(first) - 1)
    todo = list(range(len(free)))
    while todo:
        rank = todo.pop()
        now = free[rank]
        for n in range(position[rank], first[rank + 1]):
            message = awaited[n]
            if message >= 0:
                there = arrival[message]
                if there < 0:
                    waiting.setdefault(message, []).append(rank)
                    break
                if there > now:  # noqa: PLR1730  a call takes longer than all the rest
                    now = there
            starts[n] = now
            now += cost[n]
            position[rank] = n + 1
            message = sent[n]
            if message >= 0 and arrival[message] < 0:
                arrival[message] = now + lag[n]
                if message in waiting:
                    todo.extend(waiting.pop(message))
        free[rank] = now
    return np.array(starts, np.float64)


def _sweep(steps: Steps, num_messages: int) -> Times:
    """The same, found otherwise: again and again one step of every rank that can go."""
    first, awaited, sent, cost, lag = steps
    count = len(awaited)
    # Behind the messages: one that is always there, one that never comes, one that nobody awaits.
    always, never, lost = range(num_messages, num_messages + 3)
    arrival = np.full(num_messages + 3, -1.0)
    arrival[always] = 0.0
    awaited = np.append(np.where(awaited < 0, always, awaited), never)
    sent = np.where(sent < 0, lost, sent)
    begin, end = first[:-1], first[1:]
    after = np.arange(1, count + 1)
    after[end[end > begin] - 1] = count  # who has ended waits for ever
    position = np.where(end > begin, begin, count)
    starts, free = np.full(count, -1.0), np.zeros(len(begin))
    while True:
        there = arrival[awaited[position]]
        ranks = np.flatnonzero(there >= 0)
        if not len(ranks):
            return starts
        now = position[ranks]
        start = np.maximum(free[ranks], there[ranks])
        starts[now] = start
        free[ranks] = ended = start + cost[now]
        arrival[sent[now]] = ended + lag[now]
        position[ranks] = after[now]
