"""Durations: one number, or one per stage, or one per pair of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from schedules import Costs, ScheduleError, build, simulate


def refusal(**costs) -> str:
    with pytest.raises(ScheduleError) as caught:
        Costs(**costs)
    return str(caught.value)


RULE = "a duration is a finite number >= 0; give the measured time, in the same unit for all"


@pytest.mark.parametrize("name", ["f", "i", "w", "comm", "optimizer", "pair", "head", "embed"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_durations_are_finite_and_not_negative(name, value):
    assert refusal(**{name: value}) == f"Costs({name}={value!r}): {RULE}"


def test_one_of_several_is_named():
    assert refusal(f=[1, -2]) == f"Costs(f=[1, -2]) has -2: {RULE}"
    assert refusal(w=(True, 1)) == f"Costs(w=(True, 1)) has True: {RULE}"
    assert refusal(comm=[[0, float("nan")], [0, 0]]) == (
        f"Costs(comm=[[0, nan], [0, 0]]) has nan: {RULE}"
    )


@pytest.mark.parametrize("value", ["3", [], None, {1: 2}, True])
def test_what_is_no_duration_at_all(value):
    given = f"Costs(f={value!r}): must be one number, or [K] numbers"
    assert refusal(f=value) == f"{given}; give the measured time, in the same unit for all"


@pytest.mark.parametrize("number", [np.int16, np.float32, np.array])
def test_durations_of_any_kind_become_pythons(number):
    given = Costs(f=number(2), i=[number(1), 2], comm=[[0, number(1)], [1, 0]], head=number(3))
    assert given == Costs(f=2, i=(1, 2), comm=((0, 1), (1, 0)), head=3)
    kept = (given.f, given.head, *given.i, *given.comm[0])
    assert {type(value) for value in kept} <= {int, float}


def test_messages_make_a_square():
    assert refusal(comm=[[0, 1], [1]]) == (
        "Costs(comm=[[0, 1], [1]]) has 2 rows of [1, 2] numbers: comm[source][target] is a square "
        "of S rows; give that, or one number for all"
    )
    assert refusal(comm=[1, 2]) == (
        "Costs(comm=[1, 2]): must be one number, or [S, S] numbers; give the measured time, in the "
        "same unit for all"
    )


def test_a_full_backward_costs_both_halves():
    costs = Costs(f=1, i=2, w=4, comm=8)
    assert costs.table(4)[:, 3].tolist() == [1, 6, 2, 4]
    assert costs.table(2).tolist() == [[1, 1], [6, 6], [2, 2], [4, 4]]
    assert costs.messages(2).tolist() == [[0, 8], [8, 0]]


def test_stages_and_pairs_of_ranks_may_differ():
    costs = Costs(f=np.array([1.0, 3.0]), i=[2, 2.5], comm=[[9, 1], [2, 9]])
    assert costs == Costs(f=(1, 3), i=(2, 2.5), comm=((9, 1), (2, 9)))
    assert hash(costs) == hash(Costs(f=(1, 3), i=(2, 2.5), comm=((9, 1), (2, 9))))
    assert costs.table(2)[:, 1].tolist() == [3, 3.5, 2.5, 1]
    assert costs.table(2).tolist() == [[1, 3], [3, 3.5], [2, 2.5], [1, 1]]
    assert costs.messages(2).tolist() == [[0, 1], [2, 0]]  # what stays on its rank is free
    source, target = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert costs.lags(source, target, 2).tolist() == [0, 1, 2, 0]
    assert Costs(comm=8).lags(source, target, 2).tolist() == [0, 8, 8, 0]


@pytest.mark.parametrize("clock", ["event", "lockstep"])
def test_costs_of_other_sizes(clock):
    schedule = build("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs(w=[1, 2, 3]), clock)
    assert str(caught.value) == (
        "Costs(w=(1, 2, 3)) has 3 numbers for 2 stages; give one for each stage, or one number "
        "for all"
    )
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs(comm=[[0]]), clock)
    assert str(caught.value) == (
        "Costs(comm=((0,),)) is for 1 ranks, the schedule has 2; give comm[source][target] for "
        "each pair, or one number for all"
    )
