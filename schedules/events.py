"""The event clock: a rank waits only for its data, and sending does not occupy it.

It shares no code with `schedules.walk`, so that `check` is a second opinion on what `lower` does.
Letters as in `schedules.ir`, A as in `schedules.flat`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.costs import Times
from schedules.flat import B, F, Flat, I, Ints
from schedules.ir import Schedule

Columns = tuple[Ints, Ints, Times, Times]  # awaited, sent, cost, lag of every step


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


def links(schedule: Schedule, flat: Flat) -> Links:
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


def run(
    schedule: Schedule,
    flat: Flat,
    wires: Links,
    *,
    durations: Times | None = None,
    lag: Times | None = None,
    pair: float | None = None,
) -> list[list[float]]:
    """[S] lists of start times; a list shorter than its order stops where the rank waits forever.

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
    num_messages = 2 * schedule.num_stages * schedule.num_microbatches
    columns = (wires.awaited, wires.sent, cost, delay)
    if pair is None or not flat.pair.any():
        return _starts(flat.first, columns, num_messages)
    return _paired_starts(flat, columns, num_messages, np.flatnonzero(flat.pair), pair)


def _starts(first: Ints, columns: Columns, num_messages: int) -> list[list[float]]:
    """[S] lists of the starts of steps; a rank's are ``first[rank]`` to ``first[rank + 1]``."""
    bounds = first.tolist()
    awaited, sent, cost, lag = (column.tolist() for column in columns)
    arrival = [-1.0] * num_messages
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in bounds[1:]]
    free = [0.0] * len(starts)
    todo = list(range(len(starts)))
    while todo:
        rank = todo.pop()
        mine, now = starts[rank], free[rank]
        for n in range(bounds[rank] + len(mine), bounds[rank + 1]):
            message = awaited[n]
            if message >= 0:
                there = arrival[message]
                if there < 0:
                    waiting.setdefault(message, []).append(rank)
                    break
                if there > now:  # noqa: PLR1730  a call takes longer than all the rest
                    now = there
            mine.append(now)
            now += cost[n]
            message = sent[n]
            if message >= 0 and arrival[message] < 0:
                arrival[message] = now + lag[n]
                if message in waiting:
                    todo.extend(waiting.pop(message))
        free[rank] = now
    return starts


def _paired_starts(
    flat: Flat, columns: Columns, num_messages: int, opening: Ints, pair: float
) -> list[list[float]]:
    """Start times where each action at ``opening`` (ascending) overlaps with the one after it.

    Such a pair is three steps: wait for the first message; wait for the second, take the time
    of both and send the second message; send the first.
    """
    third = np.insert(np.zeros(len(flat.kind), bool), opening + 2, True)
    step = np.flatnonzero(~third)  # [A] of each action
    empty = (-1, -1, 0.0, 0.0)
    awaited, sent, cost, lag = (np.full(len(third), fill) for fill in empty)
    for column, values in zip((awaited, sent, cost, lag), columns, strict=True):
        column[step] = values
    first = step[opening]
    sent[first + 2], lag[first + 2] = sent[first], lag[first]
    sent[first], cost[first], cost[first + 1] = -1, 0.0, pair
    bounds = flat.first + np.searchsorted(opening + 2, flat.first, side="right")
    rows = _starts(bounds, (awaited, sent, cost, lag), num_messages)
    step[opening] += 1  # both start when the second message is there too
    shown = np.split(step, flat.first[1:-1])
    return [
        [row[n] for n in (steps - begin).tolist() if n < len(row)]
        for row, steps, begin in zip(rows, shown, bounds[:-1], strict=True)
    ]
