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


class Links(NamedTuple):
    """Who waits for what. A message is a number, -1 is none.

    Attributes:
      awaited: [A] the message that an action cannot start without.
      sent: [A] the message that its end releases.
      target: [A] the rank that reads what it sends; its own if it sends nothing.
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
    placement = np.array(schedule.placement, np.int64)
    return Links(awaited, sent, np.where(sent >= 0, placement[neighbour], flat.rank))


def run(
    schedule: Schedule,
    flat: Flat,
    wires: Links,
    *,
    durations: Times | None = None,
    lag: Times | None = None,
) -> list[list[float]]:
    """[S] lists of start times; a list shorter than its order stops where the rank waits forever.

    Args:
      schedule: legal or not, but `is_dense`.
      flat: its actions.
      wires: its messages.
      durations: [A] how long each action takes; 1 by default.
      lag: [A] how long the message takes that it sends; 0 by default.
    """
    first = flat.first.tolist()
    awaited, sent = wires.awaited.tolist(), wires.sent.tolist()
    cost = [1.0] * len(awaited) if durations is None else durations.tolist()
    delay = [0.0] * len(awaited) if lag is None else lag.tolist()
    arrival = [-1.0] * (2 * schedule.num_stages * schedule.num_microbatches)
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.num_ranks
    todo = list(range(schedule.num_ranks))
    while todo:
        rank = todo.pop()
        mine, now = starts[rank], free[rank]
        for n in range(first[rank] + len(mine), first[rank + 1]):
            message = awaited[n]
            if message >= 0:
                if arrival[message] < 0:
                    waiting.setdefault(message, []).append(rank)
                    break
                now = max(now, arrival[message])
            mine.append(now)
            now += cost[n]
            message = sent[n]
            if message >= 0 and arrival[message] < 0:
                arrival[message] = now + delay[n]
                todo.extend(waiting.pop(message, ()))
        free[rank] = now
    return starts
