"""Actions, schedules and costs: the notation, what is read off orders, what errors say."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Action, Schedule, ScheduleError, build, from_orders, simulate
from schedules.core.action import KINDS
from schedules.core.csv import read_csv
from schedules.core.timetable import loop_placement
from schedules.families.constructions.fold import fold

NUMBERS = st.integers(0, 10**17)


def refusal(call, *args, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        call(*args, **options)
    return str(caught.value)


@given(NUMBERS, st.sampled_from(KINDS), NUMBERS)
def test_an_action_prints_and_parses(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert str(action) == f"{stage}{kind}{microbatch}"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F", "0F", "F0", "0X0", "0f0", "00F0", "0F01", "-1F0", "0F-1", "0F0 ", "0F0\n", "0F٣"],
)
def test_what_is_no_action_does_not_parse(text):
    assert refusal(Action.parse, text) == (
        f"action {text!r} is not of the form {{stage}}{{kind}}{{microbatch}} with kind one of "
        f"F, B, I, W; write it like 3F0"
    )


def test_a_giant_action_is_cut_in_the_message():
    message = refusal(Action.parse, "0F" + "9" * 100_000)
    assert message.startswith("action '0F9999")
    assert len(message) < 200


def test_orders_are_read_as_text_or_as_actions():
    schedule = from_orders([["0F0", Action(0, "B", 0)], ["1F0", "1B0"]])
    assert schedule == Schedule(
        "custom",
        1,
        (
            (Action(0, "F", 0), Action(0, "B", 0)),
            (Action(1, "F", 0), Action(1, "B", 0)),
        ),
        (0, 1),
    )
    assert (schedule.num_ranks, schedule.num_stages) == (2, 2)


def test_placement_and_chunks_of_a_v():
    schedule = from_orders([["0F0", "3F0"], ["1F0", "2F0"]], name="v")
    assert schedule.name == "v"
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.stages_of == ((0, 3), (1, 2))
    assert schedule.chunk_of == (0, 0, 1, 1)


def test_a_given_placement_is_kept():
    assert from_orders([["0F0"], []], placement=[1]).placement == (1,)


def test_no_orders_make_an_empty_schedule():
    assert from_orders([]) == Schedule("custom", 0, (), ())


@pytest.mark.parametrize(
    ("action", "stray", "gap"),
    [("2F0", 2, 1), (Action(-1, "F", 0), -1, 1), (Action(10**17, "F", 0), 10**17, 1)],
)
def test_stages_have_no_gaps(action, stray, gap):
    assert refusal(from_orders, [["0F0", action]]) == (
        f"orders mention stage {stray} but never stage {gap}; stages are numbered 0..K-1 without "
        f"gaps, so add stage {gap} or renumber"
    )


def test_forward_keeps_the_forward_actions():
    schedule = from_orders([["0F0", "0F1", "0I0", "0W0", "0B1"]])
    assert not schedule.is_forward
    assert [str(action) for action in schedule.forward().orders[0]] == ["0F0", "0F1"]
    assert schedule.forward().is_forward


def test_a_schedule_is_frozen_and_hashable():
    schedule = from_orders([["0F0"]])
    assert {schedule: 1}[from_orders([["0F0"]])] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"


def test_folding_sorts_by_time_and_runs_the_later_stage_first():
    k, m = np.ogrid[:4, :3]
    schedule = fold("forward", 2, {"F": k + m})
    assert schedule.placement == loop_placement(4, 2) == (0, 1, 0, 1)
    assert [" ".join(map(str, order)) for order in schedule.orders] == [
        "0F0 0F1 2F0 0F2 2F1 2F2",
        "1F0 1F1 3F0 1F2 3F1 3F2",
    ]


def test_a_schedule_prints_as_a_grid():
    assert str(from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])) == (
        "step      0    1    2    3    4    5\n"
        "rank 0  0F0  0F1    .  0B0    .  0B1\n"
        "rank 1    .  1F0  1B0  1F1  1B1    ."
    )


def test_a_deadlock_prints_in_plain_order():
    assert str(from_orders([["1F0", "0F0"]])) == "step      0    1\nrank 0  1F0  0F0"


def test_nothing_prints_as_nothing():
    assert str(from_orders([])) == "step"


PAIRED = [["0F0", "0F1", "1F0", "1B0", "1F1&0B0", "1B1", "0B1"]]


@pytest.mark.parametrize("pair", [("1F1", "0B0"), ["1F1", Action(0, "B", 0)], "1F1&0B0"])
def test_a_pair_is_two_neighbours_of_a_flat_order(pair):
    schedule = from_orders([[*PAIRED[0][:4], pair, *PAIRED[0][5:]]])
    assert schedule.pairs == ((4,),)
    assert " ".join(map(str, schedule.orders[0])) == "0F0 0F1 1F0 1B0 1F1 0B0 1B1 0B1"
    assert schedule != dataclasses.replace(schedule, pairs=())
    assert schedule.forward().pairs == ()


def test_no_pairs_are_written_in_one_way():
    schedule = from_orders([["0F0"], ["1F0"]])
    assert schedule.pairs == ()
    assert dataclasses.replace(schedule, pairs=((), ())) == schedule
    assert dataclasses.replace(schedule, pairs=((), ())).pairs == ()


def test_a_pair_shares_a_cell_of_the_grid():
    assert str(from_orders(PAIRED)) == (
        "step      0    1    2    3        4    5    6\n"
        "rank 0  0F0  0F1  1F0  1B0  1F1&0B0  1B1  0B1"
    )


@pytest.mark.parametrize("item", [("0F0",), ("0F0", "0B0", "0F1"), (0, "F", 0), None, ("0F0", 3)])
def test_what_is_neither_an_action_nor_a_pair(item):
    assert refusal(from_orders, [[item]]) == (
        f"orders hold {item!r}, which is neither an action nor a pair of two; write an action "
        f"like '3F0' and a pair like '1F0&2B1'"
    )


def test_a_pair_of_more_than_two_does_not_parse():
    assert refusal(from_orders, [["0F0&1B0&0F1"]]).startswith("action '0F0&1B0&0F1' is not of")


def test_what_is_remembered_of_a_schedule_is_no_part_of_it():
    """Neither of a comparison, nor of a copy, nor of a pickle."""
    fresh, used = (build("zb_h1", num_ranks=2, num_microbatches=4) for _ in range(2))
    simulate(used, clock="lockstep")
    assert len(vars(used)) > len(vars(fresh))
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert pickle.dumps(used) == pickle.dumps(fresh)
    for twin in (copy.copy(used), copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert vars(twin) == vars(fresh)
        assert (twin, twin.name) == (used, used.name)


# --- the notation of torch 2.5 and 2.6 ---

OLDER = {
    "BW for a whole backward": (
        "0F0,0F1,0BW0,0BW1\n1F0,1B0,1F1,1B1,1W0,1W1\n",
        "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n",
    ),
    "halves alone": (
        "0F0,0F1,0B0,0B1,0W0,0W1\n1F0,1B0,1W0,1F1,1B1,1W1\n",
        "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n",
    ),
    "a pair": (
        "0F0,0F1,(0F2;0BW0)OVERLAP_F_B,0BW1,0BW2\n",
        "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n",
    ),
    "the later one": ("0F0,0I0,0F1,0B1,0W0\n", "0F0,0I0,0F1,0B1,0W0\n"),
}


@pytest.mark.parametrize("name", OLDER)
def test_files_of_older_releases(name, tmp_path):
    """Issue 38: they were refused cell by cell."""
    older, later = (tmp_path / f"{n}.csv" for n in range(2))
    older.write_text(OLDER[name][0])
    later.write_text(OLDER[name][1])
    if name == "a pair":  # of one stage, which no schedule has: but read
        assert read_csv(older) == read_csv(later)
        return
    found = Schedule.from_csv(older)
    assert found.orders == Schedule.from_csv(later).orders
