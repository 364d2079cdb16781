"""The event clock with shared work: meetings of all ranks between the ranks' own actions.

Under this clock a rank waits only for its data. But shared work (`schedules.clocks.shared`) begins
when the last rank has arrived. The lockstep layout decides its position in each rank's order:
before or after the slot that the shared work belongs to. Letters are those of
`schedules.core.action`, A is that of `schedules.core.flat`; n is the number of meetings.
"""

from __future__ import annotations

import numpy as np

from schedules.clocks.lockstep import Lockstep
from schedules.core.costs import Times
from schedules.core.events import Steps, starts_of
from schedules.core.flat import Ints, flatten
from schedules.core.messages import links


def meet(layout: Lockstep, durations: Times) -> tuple[Times, Times]:
    """Compute [A] the start of each action, and [n, 2] begin and end of each meeting.

    For a meeting, a message without duration goes from rank to rank: each rank passes it on when it
    has arrived itself, and the last rank's message goes to all.

    Args:
      layout: the schedule in lockstep.
      durations: [A] the duration of each action.
    """
    schedule, flat = layout.ticks.schedule, flatten(layout.ticks.schedule)
    after, lasts = _meetings(layout)
    first, (num_ranks, num_meetings) = flat.first, after.shape
    wires = links(schedule)
    lag = layout.costs.per_slice(schedule.num_slices).lags(flat.rank, wires.target, num_ranks)
    messages = 2 * schedule.num_stages * schedule.num_units
    words = messages + np.arange(num_ranks * num_meetings).reshape(num_ranks, num_meetings)
    heard = np.concatenate([np.full_like(words[:1], -1), words[:-1]])
    all_there = np.broadcast_to(words[-1], words.shape)
    nobody, no_time = np.full_like(words, -1), np.zeros(words.shape)
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


def _meetings(layout: Lockstep) -> tuple[Ints, Times]:
    """Return [S, n] each rank's number of own actions before a meeting, and [n] the durations."""
    lasts = np.stack(layout.sharing, axis=1)
    slot, is_after = np.nonzero(lasts)
    rows = np.split(layout.ticks.times, flatten(layout.ticks.schedule).first[1:-1])
    after = np.stack([np.searchsorted(row, slot + is_after) for row in rows])
    return after, lasts[slot, is_after]
