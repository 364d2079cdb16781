"""Work that all ranks share, under the event clock: when ranks meet for it."""

from __future__ import annotations

import numpy as np

from schedules.clocks.lockstep import Lockstep
from schedules.core.costs import Times
from schedules.core.events import Steps, message_times, starts_of
from schedules.core.flat import Ints, flatten
from schedules.core.messages import links


def meet(layout: Lockstep, durations: Times) -> tuple[Times, Times]:
    """Compute [A] the start of each action, and [n, 2] begin and end of each meeting.

    This is the event clock with work that all ranks share (`schedules.clocks.shared`), which begins
    when the last rank has arrived. Each rank's order has it at the position of the lockstep layout:
    before or after the slot that it belongs to. For a meeting, a message without duration goes from
    rank to rank: each rank passes it on when it has arrived itself, and the last rank's message
    goes to all.
    """
    schedule, flat = layout.ticks.schedule, flatten(layout.ticks.schedule)
    slot, is_after, lasts = meetings(layout)
    rows = flat.by_rank(layout.ticks.times)
    after = np.stack([np.searchsorted(row, slot + is_after) for row in rows])  # [S, n] own actions
    first, (num_ranks, num_meetings) = flat.first, after.shape
    wires = links(schedule)
    messages = 2 * schedule.num_stages * schedule.num_units
    words = messages + np.arange(num_ranks * num_meetings).reshape(num_ranks, num_meetings)
    heard = np.concatenate([np.full_like(words[:1], -1), words[:-1]])
    all_there = np.broadcast_to(words[-1], words.shape)
    nobody, no_time = np.full_like(words, -1), np.zeros(words.shape)
    lag = message_times(schedule, layout.costs)
    steps = Steps(first, wires.awaited, wires.sent, durations, lag)
    added = (  # two steps a meeting: to arrive, and to work
        (heard, all_there),
        (words, nobody),
        (no_time, np.broadcast_to(lasts, words.shape)),
        (no_time, no_time),
    )
    at = np.repeat(first[:-1, None] + after, 2, axis=1).ravel()
    columns = [
        np.insert(column, at, np.stack(two, axis=-1).ravel())
        for column, two in zip(steps[1:], added, strict=True)
    ]
    is_action = ~np.insert(np.zeros(len(durations), bool), at, np.ones(len(at), bool))
    bounds = first + 2 * num_meetings * np.arange(num_ranks + 1)
    starts = starts_of(Steps(bounds, *columns))
    begun = starts[~is_action][1 : 2 * num_meetings : 2]
    return starts[is_action], np.stack([begun, begun + lasts], axis=1)


def meetings(layout: Lockstep) -> tuple[Ints, Ints, Times]:
    """List [n] the meetings: the slot, whether it comes after the slot (0 or 1), the duration."""
    lasts = np.stack(layout.sharing, axis=1)
    slot, is_after = np.nonzero(lasts)
    return slot, is_after, lasts[slot, is_after]
