"""Stashes and crossings in host memory: places of both pools, and the proof of programs with them.

Letters: S ranks, V chunks per rank, M microbatches, P the most values that a rank holds at once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import schedules
from schedules import (
    Costs,
    Program,
    ScheduleError,
    build,
    check_program,
    from_orders,
    lower,
    simulate,
)
from tests.support.sizes import CHUNKS, sizes
from tests.support.tables import assert_no_entry_can_change, tables

OFFLOADS = ("stash", "crossings", 0.5, 0.2, 1.0)
KEEPS = ("input", "residuals")
V_SHAPED = from_orders(
    [
        ["0F0", "0F1", "3F0", "3I0", "3F1", "3W0", "3B1", "0B0", "0I1", "0W1"],
        ["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2B1", "1B1", "1W0", "2W0"],
    ]
)


def of(name: str, S: int, M: int, V: int | None = None) -> schedules.Schedule:
    V = V or CHUNKS.get(name, 1)
    return build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)


def held(program: Program, pool: str) -> list[set[int]]:
    """[S] the places of a pool that each rank uses, discard aside."""
    table, discard = program.values[pool].table, program.values[pool].discard
    return [set(table[:, :, rank].ravel().tolist()) - {discard} for rank in range(table.shape[2])]


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
def test_every_program_is_proved(name):
    for V, keep, offload in itertools.product((1, 2), KEEPS, OFFLOADS):
        if CHUNKS.get(name, V) == V:
            for S, M in sizes(name, V, ranks=(1, 4), microbatches=(8,)):
                delayed = S > M or keep == "input"
                program = lower(of(name, S, M, V), keep=keep, offload=offload, delayed=delayed)
                check_program(program, ascending=True)


@pytest.mark.parametrize("keep", KEEPS)
def test_without_offload_nothing_changes(keep):
    """Neither None nor a share of 0 moves anything, and no share adds a place."""
    schedule = of("zb_h1", 4, 8)
    plain = lower(schedule, keep=keep)
    for offload in (None, 0, 0.0):
        found = lower(schedule, keep=keep, offload=offload)
        assert found.slots == plain.slots
        assert np.array_equal(tables(found)["stash"], tables(plain)["stash"])
        assert (found.values["stash"].host, found.values["crossing"].host) == (0, 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_the_device_keeps_as_many_places_as_the_formula_says(name, share):
    """P - floor(share * P) on the device; the host holds the rest of the rank with the most."""
    for S, M in ((2, 6), (4, 8), (4, 16)):
        schedule = of(name, S, M)
        most = lower(schedule, keep="residuals").values["stash"].device
        program = lower(schedule, keep="residuals", offload=share)
        assert program.values["stash"].device == most - math.floor(share * most)
        if program.values["stash"].device < most:
            assert program.values["stash"].host >= most - program.values["stash"].device


def test_ranks_with_few_in_flight_offload_nothing():
    """Rank r of 1F1B holds S - r stashes, so the last half of the ranks fits half of the places."""
    program = lower(of("1f1b", 8, 16), keep="residuals", offload=0.5)
    assert program.values["stash"][1:] == (4, 4)
    hosted = [sum(place >= 4 for place in places) for places in held(program, "stash")]
    assert hosted == [4, 3, 2, 1, 0, 0, 0, 0]


def test_what_the_next_action_reads_stays_on_the_device():
    """The last rank of 1F1B goes back at once; no op occurs in two kinds of memory."""
    program = lower(of("1f1b", 4, 8), keep="residuals", offload="stash")
    assert program.values["stash"][1:] == (1, 4)
    assert [min(places) for places in held(program, "stash")] == [1, 1, 1, 0]
    assert held(program, "stash")[3] == {0}
    labels = sorted(op.label for op in program.slots[0].ops if op.kind == "F")
    assert labels == ["F0_first_stash", "F0_last", "F0_stash"]


def test_crossings_lie_on_the_host():
    program = lower(of("zb_h1", 4, 8), keep="residuals", offload="crossings")
    plain = lower(of("zb_h1", 4, 8), keep="residuals")
    assert program.values["crossing"].host == plain.values["crossing"].device
    assert program.values["crossing"].device == 1  # those that W reads at once
    assert program.values["stash"][1:] == (plain.values["stash"].device, 0)


def test_inputs_become_stashes_and_leave_their_buffers():
    """With ``keep="input"`` a stage's input is copied by F; its message buffer is free."""
    plain, program = (lower(of("gpipe", 4, 8), offload=offload) for offload in (None, "stash"))
    assert (plain.values["operand"].device, plain.values["stash"].host) == (9, 0)
    assert (program.values["operand"].device, *program.values["stash"][1:]) == (1, 0, 8)


def most_on_device(spans: list[tuple[int, int]], places: int) -> int:
    """Number of lives that fit into so many places, by trying all sets of them."""
    for count in range(len(spans), -1, -1):
        for chosen in itertools.combinations(spans, count):
            if all(sum(a < t <= b for a, b in chosen) <= places for _, t in chosen):
                return count
    raise AssertionError


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_v"])
def test_as_many_as_possible_stay_on_the_device(name):
    """The choice is the best there is: trying every set finds none that is larger."""
    S, M = 2, 5
    program = lower(of(name, S, M), keep="residuals", offload=0.5)
    width = len(program.slots)
    for rank in range(S):
        born: dict[tuple[int, int], int] = {}
        spans, kept = [], 0
        for time in range(program.num_ticks * width):
            at = (*divmod(time, width), rank)
            if not program.op[at]:
                continue
            op = program.slots[at[1]].ops[program.op[at] - 1]
            key = op.chunk, int(program.microbatch[at])
            if op.kind == "F":
                born[key] = time
            elif op.kind in "BI":
                spans.append((born[key], time))
                kept += "stash" not in op.host
        assert kept == most_on_device(spans, program.values["stash"].device)


@pytest.mark.few
@pytest.mark.parametrize("offload", ["stash", "crossings", 0.5])
@pytest.mark.parametrize("keep", KEEPS)
def test_no_entry_of_a_table_can_change(keep, offload):
    """Every other place of a stash or crossing, of either memory, makes a program wrong."""
    program = check_program(lower(V_SHAPED, keep=keep, pattern="single", offload=offload))
    assert program.values["stash"].host + program.values["crossing"].host
    assert_no_entry_can_change(program, ("op", "operand", "stash", "crossing"))


def refusal(program: Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_program(program)
    return str(caught.value)


def test_an_op_names_the_memory_of_its_places():
    program = lower(of("1f1b", 2, 3), keep="residuals", pattern="single", offload="stash")
    (slot,) = program.slots
    ops = tuple(op._replace(host=()) for op in slot.ops)
    assert refusal(replace(program, slots=(slot._replace(ops=ops),))) == (
        "program of schedule '1f1b': tick 0, slot 0, rank 0: 0F0 takes its stash from the memory "
        "of the device: expected stash 0..0 or discard, 3, found stash 1; this program would "
        "compute something else, so lower the schedule again"
    )
    ops = tuple(op._replace(host=("stash",) if op.kind in "FB" else ()) for op in slot.ops)
    assert refusal(replace(program, slots=(slot._replace(ops=ops),))) == (
        "program of schedule '1f1b': tick 1, slot 0, rank 1: 1F0 takes its stash from the memory "
        "of the host: expected stash 1..2, found stash 0; this program would compute something "
        "else, so lower the schedule again"
    )


# --- the clocks ---


def durations(costs: Costs, clock: str, name: str = "1f1b", **options) -> dict[str, float]:
    """Duration of every action, by its name."""
    report = simulate(of(name, 2, 3), costs, clock, **options)
    rows = zip(report.schedule.orders, report.starts, report.ends, strict=True)
    return {str(a): t - s for row in rows for a, s, t in zip(*row, strict=True)}


@pytest.mark.parametrize("clock", ["event", "lockstep"])
@pytest.mark.parametrize(("overlap", "f", "b"), [(1.0, 3, 4), (0.5, 3.5, 5), (0.0, 4, 7)])
def test_an_action_that_moves_a_stash_takes_its_copy_into_account(clock, overlap, f, b):
    """F takes 1, B 4, a copy 3; rank 1 goes back at once, so its stashes stay on the device."""
    costs = Costs(f=1, i=2, w=2, host=3, host_overlap=overlap)
    found = durations(costs, clock, offload="stash", keep="residuals")
    assert {found[f"0F{m}"] for m in range(3)} == {f}
    assert {found[f"0B{m}"] for m in range(3)} == {b}
    assert {found[f"1F{m}"] for m in range(3)} == {1}
    assert {found[f"1B{m}"] for m in range(3)} == {4}


def test_the_input_of_the_first_stage_is_made_anew():
    """With ``keep="input"`` it moves only where all ranks share the embedding."""
    costs = Costs(host=9)
    assert set(durations(costs, "event", offload="stash").values()) == {1, 2}
    found = durations(costs, "event", offload="stash", shared=("embed",))
    assert (found["0F0"], found["0B0"], found["1F0"], found["1B0"]) == (9, 9, 1, 2)


def test_crossings_move_between_the_halves():
    found = durations(Costs(host=9), "event", "zb_h1", offload="crossings", keep="residuals")
    moved = {name for name, taken in found.items() if taken == 9}
    assert moved
    assert {name[1] for name in moved} == {"I", "W"}
    assert moved == {name[0] + kind + name[2] for name in moved for kind in "IW"}


def test_a_slice_moves_its_part():
    schedule = build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=4)
    report = simulate(schedule, Costs(f=4, host=12), offload="stash", keep="residuals")
    taken = {t - s for s, t in zip(report.starts[0], report.ends[0], strict=True)}
    assert taken == {3}  # F takes 1, B 0.5, a copy 3


def test_lowering_chooses_slots_with_what_moves():
    """Pairs of slots gain where F and B are balanced; a copy that F waits for unbalances them."""
    schedule = of("interleaved_1f1b", 4, 8, 2)
    for host in (0, 50):
        costs = Costs(host=host, host_overlap=0, comm=0.1)
        options = {"offload": 0.5, "keep": "residuals", "partners": True}
        program = lower(schedule, costs=costs, **options)
        makespans = {
            name: simulate(schedule, costs, "lockstep", pattern=name, **options).makespan
            for name in ("single", "paired", "partner")
        }
        width = {"single": 1, "paired": 2, "partner": 2}
        assert len(program.slots) == width[min(makespans, key=makespans.__getitem__)]


def test_reports_say_what_moved():
    report = simulate(of("1f1b", 2, 2), Costs(), offload="stash", keep="residuals")
    assert list(map(str, report.schedule.orders[0])) == ["0F0", "0F1", "0B0", "0B1"]
    assert report.moved == ((True, True, True, True), (False, False, False, False))
    assert simulate(of("1f1b", 2, 2)).moved == ()


@pytest.mark.parametrize("clock", ["event", "lockstep"])
def test_writes_and_reads_hide_beside_shares_of_their_own(clock):
    """F takes 4, B 6, a copy 3: F hides 2 of a write, B nothing of its own read."""
    costs = Costs(f=4, i=3, w=3, host=3, host_overlap=(0.5, 0))
    found = durations(costs, clock, offload="stash", keep="residuals")
    assert {found[f"0F{m}"] for m in range(3)} == {4 + 3 - 2}
    assert {found[f"0B{m}"] for m in range(3)} == {6 + 3}


def test_one_share_stands_for_two():
    assert Costs(host_overlap=0.5).overlaps == (0.5, 0.5)
    assert Costs(host_overlap=np.array([0.5, 0])).overlaps == (0.5, 0)
    assert hash(Costs(host_overlap=[0.5, 0])) == hash(Costs(host_overlap=(0.5, 0)))


def test_a_third_share_was_removed_with_reads_that_start_early():
    with pytest.raises(ScheduleError) as caught:
        Costs(host_overlap=(0.7, 0.05, 0))
    assert str(caught.value) == (
        "Costs(host_overlap=(0.7, 0.05, 0)): the third share was removed with reads that start "
        "early; give two, beside a write of F and beside a copy of another action"
    )


@pytest.mark.parametrize(
    "value", [-0.1, 1.5, "half", float("nan"), True, (0.5,), (0, 2), "abc", []]
)
def test_a_share_of_overlap(value):
    with pytest.raises(ScheduleError) as caught:
        Costs(host_overlap=value)
    assert str(caught.value) == (
        f"Costs(host_overlap={value!r}): must be a share from 0 to 1, 1 if copies over the host "
        f"link overlap with an action's work, 0 if it waits for them, or two shares of an "
        f"action's work: beside a write of F, beside a copy of another action"
    )


@pytest.mark.parametrize("offload", ["stashes", 1.5, -0.1, True, float("nan"), ["stash"]])
def test_bad_input(offload):
    with pytest.raises(ScheduleError) as caught:
        lower(of("1f1b", 2, 2), offload=offload)
    assert str(caught.value) == (
        f"offload={offload!r}: must be 'stash' (the values that F keeps for its backward are in "
        f"host memory), 'crossings' (those that I keeps for W are), a share of the stashes from 0 "
        f"to 1 such as 0.5, or None for neither"
    )


def test_an_op_in_host_memory_says_so():
    ops = [
        op
        for slot in lower(
            build("1f1b", num_ranks=2, num_microbatches=4), keep="residuals", offload="stash"
        ).slots
        for op in slot.ops
    ]
    assert any(repr(op).endswith("host=('stash',))") for op in ops)
    assert not any("host" in repr(op) for op in ops if not op.host)
