"""The event clock with shared work: meetings of all ranks between the ranks' own actions.

Under this clock a rank waits only for its data; but what all ranks do together
(`schedules.clocks.shared`) begins when the last of them has come. Where it stands in the order of
each rank is for lockstep to say: before or after the slot that the common work belongs to. Letters
as in `schedules.core.action`, A as in `schedules.core.flat`; n is the number of meetings.
"""

from __future__ import annotations

import numpy as np

from schedules.clocks.lockstep import Lockstep
from schedules.core.costs import Times
from schedules.core.events import Steps, starts_of
from schedules.core.flat import Ints, flatten
from schedules.core.messages import links


def meet(layout: Lockstep, durations: Times) -> tuple[Times, Times]:
    """[A] when each action starts, and [n, 2] when each meeting begins and ends.

    For a meeting, word that all have come goes from rank to rank, in no time: each passes it on
    when it is there itself, and the last one's is for all.

    Args:
      layout: the schedule in lockstep.
      durations: [A] how long each action takes.
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
    added = (  # two steps a meeting: to come, and to work
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
    """[S, n] how many of its own actions a rank does before each, and [n] how long each takes."""
    lasts = np.stack(layout.sharing, axis=1)
    slot, is_after = np.nonzero(lasts)
    rows = np.split(layout.ticks.times, flatten(layout.ticks.schedule).first[1:-1])
    after = np.stack([np.searchsorted(row, slot + is_after) for row in rows])
    return after, lasts[slot, is_after]
