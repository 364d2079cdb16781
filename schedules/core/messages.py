"""The graph of messages, which all clocks, checks, lowering and drawings use.

A unit is a microbatch or a slice of one; U is the number of units. The output of a stage for a unit
is message ``2 * (stage * U + unit)``; the gradient of that stage's input is the next number. -1
means no message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedules.core.flat import F, Ints, Mask, W, flatten, once
from schedules.core.timetable import Timetable


class Links(NamedTuple):
    """The messages of actions.

    Attributes:
      awaited: [A] the message that an action needs to start.
      sent: [A] the message that its end releases.
      target: [A] the rank that the message goes to; the action's own rank without a message.
      crosses: [A] whether that is another rank.
    """

    awaited: Ints
    sent: Ints
    target: Ints
    crosses: Mask


@once
def links(schedule: Timetable) -> Links:
    """Find the messages of a schedule, legal or not; an invalid entry has no message."""
    flat = flatten(schedule)
    placement = np.array(schedule.placement, np.int64)
    wires = connect(
        flat.kind, flat.stage, flat.microbatch, flat.rank, placement, schedule.num_units
    )
    if flat.in_range.all():
        return wires
    awaited, sent = (np.where(flat.in_range, column, -1) for column in wires[:2])
    target = np.where(flat.in_range, wires.target, flat.rank)
    return Links(awaited, sent, target, target != flat.rank)


def connect(
    kind: Ints, stage: Ints, microbatch: Ints, rank: Ints, placement: Ints, num_microbatches: int
) -> Links:
    """Find the messages of actions given as [A] columns; ``placement`` has [K] ranks.

    Outputs go to the next stage, gradients to the previous stage.
    """
    last = len(placement) - 1
    step = np.where(kind == F, 1, -1)  # from the sending stage to the reading stage
    reader, writer = stage + step, stage - step
    code = 2 * (stage * num_microbatches + microbatch) + (kind != F)
    sent = np.where((kind != W) & (reader >= 0) & (reader <= last), code, -1)
    awaited = np.where(
        (kind != W) & (writer >= 0) & (writer <= last), code - 2 * step * num_microbatches, -1
    )
    target = np.where(sent < 0, rank, placement[np.clip(reader, 0, last)])
    return Links(awaited, sent, target, target != rank)


@once
def senders(schedule: Timetable) -> Ints:
    """Return [A] the index of the action that sends each action's message, -1 for none."""
    wires = links(schedule)
    sends = np.flatnonzero(wires.sent >= 0)
    sender_of = np.full(2 * schedule.num_stages * schedule.num_units + 1, -1)
    sender_of[wires.sent[sends[::-1]]] = sends[::-1]  # for repeated messages the first send counts
    senders_of: Ints = sender_of[wires.awaited]  # -1 selects the last entry, which is -1
    return senders_of
