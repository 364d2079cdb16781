"""The event clock: a rank waits only for its data, and sending does not occupy it.

It shares no code with `schedules.walk`, so that `check` is a second opinion on what `lower` does.
Letters as in `schedules.ir`, A as in `schedules.flat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedules.flat import B, F, Flat, I, Ints
from schedules.ir import KINDS, Kind, Schedule

NOTHING = -1, -1  # no message, sent by nobody
UNIT: Mapping[Kind, int] = dict.fromkeys(KINDS, 1)


class Links(NamedTuple):
    """Who waits for what. A message is a number, -1 is none.

    Attributes:
      awaited: [A] the message that an action cannot start without.
      sent: [A] the message that its end releases.
      crosses: [A] 1 where the message that it sends leaves its rank.
    """

    awaited: Ints
    sent: Ints
    crosses: Ints


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
    return Links(awaited, sent, (placement[neighbour] != flat.rank).astype(np.int64))


def run(
    schedule: Schedule,
    flat: Flat,
    wires: Links,
    *,
    durations: Mapping[Kind, float] = UNIT,
    comm: float = 0.0,
    pair: float | None = None,
) -> list[list[float]]:
    """[S] lists of start times; a list shorter than its order stops where the rank waits forever.

    Args:
      schedule: legal or not, but `is_dense`.
      flat: its actions.
      wires: its messages.
      durations: how long each kind takes.
      comm: how long a message takes that leaves its rank.
      pair: how long an overlapped pair takes: its two actions start together, when both have
        their messages, and send at their common end. None: one after the other, as if no pair.
    """
    first = flat.first.tolist()
    awaited, sent = wires.awaited.tolist(), wires.sent.tolist()
    cost = np.array([durations[kind] for kind in KINDS])[flat.kind].tolist()
    gates, late = _join(flat, awaited, sent, cost, pair)
    lag = (wires.crosses * comm).tolist()
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
            if n in gates:
                message = gates[n]
                if arrival[message] < 0:
                    waiting.setdefault(message, []).append(rank)
                    break
                now = max(now, arrival[message])
            mine.append(now)
            now += cost[n]
            for message, sender in ((sent[n], n), late.get(n, NOTHING)):
                if message >= 0 and arrival[message] < 0:
                    arrival[message] = now + lag[sender]
                    todo.extend(waiting.pop(message, ()))
        free[rank] = now
    return starts


def _join(
    flat: Flat, awaited: list[int], sent: list[int], cost: list[float], pair: float | None
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Make each pair one action: its first waits for both messages, its second sends both.

    The first takes no time, the second all of it, so both start together. Changes the lists;
    returns the message that the first of a pair awaits besides its own, and the (message, sender)
    that its second sends besides its own. ``pair`` None leaves all as it is.
    """
    gates: dict[int, int] = {}
    late: dict[int, tuple[int, int]] = {}
    if pair is None:
        return gates, late
    for n in np.flatnonzero(flat.pair).tolist():
        cost[n], cost[n + 1] = 0.0, pair
        if awaited[n + 1] >= 0:
            gates[n] = awaited[n + 1]
        late[n + 1] = sent[n], n
        sent[n] = -1
    return gates, late
