"""Slices that take equal time (issue 41)."""

from __future__ import annotations

import itertools

import pytest

import schedules


@pytest.mark.parametrize("attention", [0, 0.2, 0.5, 0.9, 1])
@pytest.mark.parametrize("num_slices", [1, 2, 4, 7])
def test_slices_take_equal_time(num_slices, attention):
    """By the count of keys that queries read, to within one block."""
    T = 4096
    lengths = schedules.equal_time(T, num_slices, attention=attention, multiple=4)
    assert sum(lengths) == T
    assert all(length > 0 and length % 4 == 0 for length in lengths)
    assert all(a >= b - 4 for a, b in itertools.pairwise(lengths))
    ends = [sum(lengths[:n]) / T for n in range(num_slices + 1)]
    until = [(1 - attention) * x + attention * x * x for x in ends]
    times = [b - a for a, b in itertools.pairwise(until)]
    assert max(times) - min(times) <= 4 * (1 + attention) * 4 / T


def test_known_cuts():
    assert schedules.equal_time(16, 4, attention=0) == (4, 4, 4, 4)
    assert schedules.equal_time(16, 4, attention=1) == (8, 3, 3, 2)
    assert schedules.equal_time(5, 5, attention=1) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("num_slices", [2, 3, 8])
def test_the_share_of_attention_from_times_of_slices(share, num_slices):
    parts = [(2 * n + 1) / num_slices for n in range(num_slices)]
    times = [(1 - share + share * part) / num_slices for part in parts]
    found = schedules.equal_time(4096, 4, attention=schedules.Costs(slices=times))
    assert found == schedules.equal_time(4096, 4, attention=share)


def test_times_that_no_attention_has():
    """Noise may say that later slices are quicker, or that they take all of the time."""
    early, late = schedules.Costs(slices=[3, 1]), schedules.Costs(slices=[0, 1])
    assert schedules.equal_time(16, 4, attention=early) == (4, 4, 4, 4)
    assert schedules.equal_time(16, 4, attention=late) == (8, 3, 3, 2)


def message(*args, **options):
    with pytest.raises(schedules.ScheduleError) as caught:
        schedules.equal_time(*args, **options)
    return str(caught.value)


def test_numbers_out_of_range():
    assert message(0, 2, attention=0.5) == "length=0: must be an integer >= 1"
    assert message(8, 2.5, attention=0.5) == "num_slices=2.5: must be an integer >= 1"
    assert message(8, 2, attention=1.5) == (
        "attention=1.5: must be the share of attention in the time of a whole sequence, from 0 to 1"
    )
    assert message(100, 2, attention=0.5, multiple=64) == (
        "length=100 with num_slices=2 and multiple=64: every slice has one multiple at least and "
        "together they are all positions; pad sequences to a multiple of 64, or take fewer slices"
    )
    assert message(16, 2, attention=schedules.Costs(f=2)).endswith(
        ": these costs say nothing of slices; calibrate a pipeline with slices=2 or more, or give "
        "the share of attention, from 0 to 1"
    )
