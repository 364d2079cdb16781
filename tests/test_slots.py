"""Slots are filled alike action by action and all ranks at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule, ScheduleError, from_orders
from schedules.clocks import slots
from schedules.clocks.slots import slot_times
from schedules.clocks.ticks import PATTERNS
from tests.test_events import moved


def times(schedule: Schedule, pattern: str, many: int) -> list[int] | str:
    """What `slot_times` returns or, where it refuses, says; of a copy, which knows nothing yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "MANY", many)
        try:
            return slot_times(replace(schedule), PATTERNS[pattern]).tolist()
        except ScheduleError as error:
            return str(error)


@settings(max_examples=100)
@given(moved(), st.sampled_from(sorted(PATTERNS)))
def test_few_and_many_are_laid_out_alike(schedule, pattern):
    assert times(schedule, pattern, 0) == times(schedule, pattern, 99)


@pytest.mark.parametrize("many", [0, 99])
def test_the_slots_of_a_small_schedule(many):
    schedule = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    expected = {
        "single": [0, 1, 3, 5, 1, 2, 3, 4],
        "paired": [0, 2, 5, 7, 2, 3, 4, 5],
        "unit": [0, 3, 7, 10, 3, 4, 6, 7],
        "partner": [0, 2, 3, 5, 1, 2, 3, 4],
    }
    assert {name: times(schedule, name, many) for name in PATTERNS} == expected


@pytest.mark.parametrize("many", [0, 99])
def test_a_deadlock_is_refused(many):
    schedule = from_orders([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    assert times(schedule, "single", many) == (
        "schedule 'custom' deadlocks: rank 0 at 0B0, rank 1 at 1F1; schedules.check(schedule) "
        "shows the grid and the culprit"
    )
