"""Slots of lockstep ticks, and what is said of ranks that wait for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule, ScheduleError, check, from_orders
from schedules.clocks.ticks import PATTERNS, slot_times
from schedules.core.flat import flatten
from schedules.core.messages import links
from tests.unit_clocks.test_events import moved


def times(schedule: Schedule, pattern: str) -> list[int]:
    return slot_times(schedule, PATTERNS[pattern]).tolist()


def slot_by_slot(schedule: Schedule, pattern: str, *, delayed: bool) -> list[int]:
    """Slots by brute force: in each every rank runs its next action, if it can; -1 for never."""
    slots, flat, wires = PATTERNS[pattern], flatten(schedule), links(schedule)
    first = flat.first.tolist()
    found, usable, done = [-1] * len(flat.kind), {-1: 0}, [0] * schedule.num_ranks
    for time in range(3 * len(slots) * (len(found) + 1)):
        for rank, order in enumerate(schedule.orders):
            if done[rank] == len(order):
                continue
            n, permitted = first[rank] + done[rank], slots[time % len(slots)]
            if order[done[rank]].kind not in permitted[rank % len(permitted)]:
                continue
            if usable.get(int(wires.awaited[n]), time + 1) <= time:
                found[n] = time
                usable[int(wires.sent[n])] = time + 1 + (delayed and bool(wires.crosses[n]))
                usable[-1] = 0
                done[rank] += 1
    return found


@settings(max_examples=100)
@given(moved(), st.sampled_from(sorted(PATTERNS)), st.booleans())
def test_they_are_what_one_slot_after_the_other_makes(schedule, pattern, delayed):
    wanted = slot_by_slot(schedule, pattern, delayed=delayed)
    if min(wanted) < 0:
        with pytest.raises(ScheduleError, match="- deadlock: rank "):
            slot_times(schedule, PATTERNS[pattern], delayed=delayed)
    else:
        assert slot_times(schedule, PATTERNS[pattern], delayed=delayed).tolist() == wanted


def test_the_slots_of_a_small_schedule():
    schedule = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    expected = {
        "single": [0, 1, 3, 5, 1, 2, 3, 4],
        "paired": [0, 2, 5, 7, 2, 3, 4, 5],
        "unit": [0, 3, 7, 10, 3, 4, 6, 7],
        "partner": [0, 2, 3, 5, 1, 2, 3, 4],
    }
    assert {name: times(schedule, name) for name in PATTERNS} == expected


def test_a_deadlock_is_refused():
    schedule = from_orders([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    with pytest.raises(ScheduleError) as caught:
        times(schedule, "single")
    with pytest.raises(ScheduleError) as checked:
        check(schedule)
    assert str(caught.value) == str(checked.value)
