"""Durations: one number, or one per stage, or one per pair of ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from schedules import Costs, ScheduleError, build, lower, simulate
from schedules.core.records import costs_of, costs_record
from schedules.core.timetable import actions_of


def refusal(**costs) -> str:
    with pytest.raises(ScheduleError) as caught:
        Costs(**costs)
    return str(caught.value)


RULE = "a duration is a finite number >= 0; give the measured time, in the same unit for all"


DURATIONS = ["f", "i", "w", "b", "comm", "optimizer", "pair", "head", "embed", "host"]


@pytest.mark.parametrize("name", DURATIONS)
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


def test_what_is_no_whole_backward():
    assert refusal(b=[2, -1]) == f"Costs(b=[2, -1]) has -1: {RULE}"
    assert refusal(b="2") == (
        "Costs(b='2'): must be one number, or [K] numbers; give the measured time, in the same "
        "unit for all"
    )
    with pytest.raises(TypeError):  # in fourth place stands comm, as ever
        Costs(1, 1, 1, 0.1, 0, None, 0, 0, 2)


@pytest.mark.parametrize("number", [np.int16, np.float32, np.array])
def test_durations_of_any_kind_become_pythons(number):
    given = Costs(f=number(2), i=[number(1), 2], comm=[[0, number(1)], [1, 0]], head=number(3))
    assert given == Costs(f=2, i=(1, 2), comm=((0, 1), (1, 0)), head=3)
    kept = (given.f, given.head, *given.i, *given.comm[0])
    assert {type(value) for value in kept} <= {int, float}
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    durations = {a: number(1) for a in actions_of(schedule)}
    assert simulate(schedule, clock="measured", durations=durations).makespan == 6


def test_a_share_of_any_kind_becomes_pythons():
    kept = Costs(host_overlap=np.float32(0.5)).host_overlap
    assert type(kept) is float
    assert kept == 0.5


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


def test_a_whole_backward_has_its_own_price():
    assert Costs(1, 2, 4, b=5).table(2).tolist() == [[1, 1], [5, 5], [2, 2], [4, 4]]
    per_stage = Costs(1, 2, 4, b=np.array([5.0, 3]), head=1, embed=2)
    assert per_stage.table(2).tolist() == [[3, 1], [7, 4], [4, 3], [4, 4]]
    assert per_stage.table(2, ("embed", "head")).tolist() == [[1, 1], [5, 3], [2, 2], [4, 4]]
    with pytest.raises(ScheduleError) as caught:
        per_stage.table(4)
    assert str(caught.value) == (
        "Costs(b=(5.0, 3.0)) has 2 numbers for 4 stages; give one for each stage, or one number "
        "for all"
    )


def test_1f1b_with_a_whole_backward_of_its_own_price_by_hand():
    """F 2, B 3, though I and W would take 2 each."""
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=2), Costs(2, 2, 2, b=3)
    event = simulate(schedule, costs)
    assert event.starts == ((0, 2, 7, 12), (2, 4, 7, 9))  # 0F0 0F1 0B0 0B1, 1F0 1B0 1F1 1B1
    assert (event.makespan, event.work, event.ideal) == (15, (10, 10), 10)
    assert event.explain().parts[0]["drain"] == 2  # for 1B1, from 10 to 12
    lockstep = simulate(schedule, costs, "lockstep", pattern="single")
    assert lockstep.makespan == 2 + 2 + 3 + 3 + 3 + 3  # 0F0 | 0F1 1F0 | 1B0 | 0B0 1F1 | 1B1 | 0B1


def test_the_slots_that_are_fastest_depend_on_the_whole_backward():
    """A B as long as an F shares its slots; if it is longer, F would wait."""
    schedule = build("eager_1f1b", num_ranks=4, num_microbatches=8)
    assert lower(schedule, costs=Costs(b=1)).pattern == ("FBIW",)
    assert lower(schedule, costs=Costs(b=1.5)).pattern == ("F", "BIW")


def test_what_splitting_adds_is_lost_against_the_ideal():
    costs = Costs(1, 2, 2, b=3)
    split = simulate(build("zb_h1", num_ranks=1, num_microbatches=4), costs)
    assert (split.makespan, split.ideal, split.efficiency) == (20, 16, 1)
    assert split.against_ideal == 16 / 20
    dear = Costs(1, 2, 2, b=6)  # then halves are the ideal, where there are any
    ideals = [
        simulate(build(name, num_ranks=1, num_microbatches=4), dear).ideal
        for name in ("gpipe", "zb_h1")
    ]
    assert ideals == [28, 20]
    inference = simulate(build("gpipe", num_ranks=2, num_microbatches=4).forward(), costs)
    assert (inference.makespan, inference.ideal) == (5, 4)
    shared = simulate(
        build("1f1b", num_ranks=2, num_microbatches=4),
        Costs(1, 1, 1, b=1, head=2, embed=1),
        shared=("embed", "head"),
    )
    assert shared.ideal == 4 * 2 + 4 * (2 + 2 * 1) / 2 == shared.work[0]


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


def test_files_have_what_is_set():
    """Costs without slices and host memory are written as they always were."""
    plain, full = Costs(1, 2, 3), Costs(1, 2, 3, slices=(1, 2), host=(0.5, 1), host_overlap=0.25)
    assert sorted(costs_record(plain)) == sorted(
        ["f", "i", "w", "b", "comm", "optimizer", "pair", "head", "embed"]
    )
    for costs in (plain, full):
        record = json.loads(json.dumps({"costs": costs_record(costs)}))
        assert costs_of(record) == costs


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
