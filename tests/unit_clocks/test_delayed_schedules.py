"""Delayed sends in `lower`, `simulate` and `check_program`: one slot later, and hidden behind work.

Letters as in `schedules.core.action`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import (
    Action,
    Costs,
    Program,
    Schedule,
    ScheduleError,
    build,
    check_program,
    from_orders,
    lower,
    simulate,
)
from schedules.clocks.lockstep import fastest
from schedules.clocks.report import Wait
from schedules.clocks.ticks import PATTERNS
from schedules.tools.terminal import render
from tests.support.sizes import CHUNKS, is_legal
from tests.support.tables import tables
from tests.unit_clocks.test_check_program import (
    SMALL_CASES,
    TABLES,
)

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
KERNEL = Path(__file__).parents[2] / "bench" / "notes" / "kernel.md"


def late(schedule: Schedule, costs: Costs | None = None, **options):
    """A report of delayed sends."""
    return simulate(schedule, costs, "lockstep", delayed=True, **options)


# --- when things run ---


@pytest.mark.parametrize(
    ("comm", "starts", "makespan"),
    [
        # Slots: 0F0 | 0F1 | 1F0 | 1B0 | 1F1 | 0B0 1B1 | nothing | 0B1.
        (0, ((0, 2, 12, 16), (4, 6, 10, 12)), 20),
        (1, ((0, 2, 12, 17), (4, 6, 10, 12)), 21),  # only the idle slot pays
        (3, ((0, 3, 16, 23), (6, 9, 13, 16)), 27),
        (10, ((0, 10, 50, 70), (20, 30, 40, 50)), 74),
    ],
)
def test_an_exchange_costs_what_is_longer_than_the_work_beside_it(comm, starts, makespan):
    report = late(from_orders(TWO), Costs(f=2, i=3, w=1, comm=comm), pattern="single")
    assert (report.starts, report.makespan) == (starts, makespan)
    assert (report.delayed, report.pattern) == (True, "single")


def test_partners_meet_where_a_slot_begins():
    """Two ranks then lose nothing: no start is later than on the event clock."""
    schedule, costs = from_orders(TWO), Costs(f=2, i=3, w=1, comm=1)
    report = late(schedule, costs, pattern="single", partners=True)
    assert report.starts == ((0, 2, 10, 16), (3, 5, 9, 11)) == simulate(schedule, costs).starts


@pytest.mark.parametrize("S", [2, 4, 8])
def test_eager_1f1b_waits_for_no_message_that_is_shorter_than_a_forward(S):
    """Its messages travel in the slot that its paired ticks have between any two of a kind."""
    schedule = build("eager_1f1b", num_ranks=S, num_microbatches=4 * S)
    free = simulate(schedule, clock="lockstep")
    for comm in (0, 0.25, 1):
        found = late(schedule, Costs(comm=comm), pattern="paired")
        # The first ticks have no backward, the last no forward, to travel beside.
        assert found.makespan - free.makespan == pytest.approx(2 * (S - 1) * comm)
        assert lower(schedule, pattern="paired", delayed=True).num_ticks == 4 * S + 2 * (S - 1)
    prompt = simulate(schedule, Costs(comm=1), "lockstep", pattern="paired")
    assert prompt.makespan - free.makespan == 2 * (4 * S + 2 * (S - 1)) - 1


@settings(max_examples=100)
@given(
    st.sampled_from(SMALL_CASES),
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.floats(0, 5), min_size=4, max_size=4),
    st.sampled_from(sorted(PATTERNS)),
    st.booleans(),
)
def test_what_the_clock_says_of_a_layout(case, S, M, costs, pattern, partners):
    """Between what the layout takes with free messages and what every exchange would add."""
    (name, V), (*work, comm) = case, costs
    if not is_legal(name, S, M, V):
        return
    schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
    options = {"pattern": pattern, "partners": partners}
    report = late(schedule, Costs(*work, comm), **options)
    count = lower(schedule, pattern=pattern, delayed=True).num_ticks * len(PATTERNS[pattern])
    free = late(schedule, Costs(*work), **options).makespan
    assert free <= report.makespan + 1e-9
    assert report.makespan <= free + count * comm + 1e-9
    assert simulate(schedule, Costs(*work, comm)).makespan <= report.makespan + 1e-9
    assert report.delayed == (S > 1)


def test_a_delayed_message_waits_for_its_slot():
    """Under way as long as it takes; until the slot ends in which it travels, that is lockstep."""
    report = late(from_orders(TWO), Costs(f=2, i=3, w=1, comm=1), pattern="single")
    assert report.explain().waits == (
        (
            Wait(4, 10, "fill", 2, Action(1, "B", 0)),
            Wait(10, 11, "communication", 2, Action(1, "B", 0)),
            Wait(11, 12, "lockstep", 2, Action(1, "B", 0)),
            Wait(16, 17, "communication", 3, Action(1, "B", 1)),
        ),
        (
            Wait(0, 2, "fill", 0, Action(0, "F", 0)),
            Wait(2, 3, "communication", 0, Action(0, "F", 0)),
            Wait(3, 4, "lockstep", 0, Action(0, "F", 0)),
            Wait(16, 21, "optimizer wait", None, None),
        ),
    )


def test_it_is_drawn_as_it_runs():
    rows = render(late(from_orders(TWO), pattern="single"), colour=False).splitlines()[1:3]
    assert [row.split()[2:] for row in rows] == [
        ["0F0", "0F1", ".", ".", ".", "0B0", "0B1"],
        [".", ".", "1F0", "1B0", "1F1", "1B1", "."],
    ]


# --- what is chosen ---


def test_the_faster_is_taken_where_it_is_open():
    schedule = build("eager_1f1b", num_ranks=4, num_microbatches=8)
    for comm, faster in ((0, False), (0.5, True)):
        report = simulate(schedule, Costs(comm=comm), "lockstep", delayed=None)
        assert report.delayed is faster
        assert lower(schedule, costs=Costs(comm=comm), delayed=None).delayed is faster
        both = [simulate(schedule, Costs(comm=comm), "lockstep", delayed=d) for d in (False, True)]
        assert report.makespan == min(each.makespan for each in both)
    assert not simulate(schedule, Costs(comm=0.5), "lockstep").delayed  # unless it is asked for


@pytest.mark.parametrize("partners", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "eager_1f1b", "zb_h1", "zb_v"])
def test_no_pattern_is_faster_than_the_one_taken(name, partners):
    V = CHUNKS.get(name, 1)
    schedule = build(name, num_ranks=4, num_microbatches=8, num_stages=4 * V)
    for costs in (Costs(), Costs(1, 1.2, 0.8, 0.3), Costs(comm=2)):
        spans = [late(schedule, costs, pattern=p, partners=partners).makespan for p in PATTERNS]
        assert late(schedule, costs, partners=partners).makespan == min(spans)


@pytest.mark.parametrize("delayed", [True, None])
def test_on_one_rank_nothing_is_delayed(delayed):
    schedule = build("interleaved_1f1b", num_ranks=1, num_microbatches=3, num_stages=2)
    assert not fastest(schedule, None, Costs(), delayed=delayed).ticks.delayed
    prompt = simulate(schedule, clock="lockstep")
    assert simulate(schedule, clock="lockstep", delayed=delayed) == prompt
    program, wanted = lower(schedule, delayed=delayed), lower(schedule)
    assert (program.delayed, program.slots) == (False, wanted.slots)
    for table in TABLES:
        np.testing.assert_array_equal(tables(program)[table], tables(wanted)[table])


def refusal(function, *args, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        function(*args, **options)
    return str(caught.value)


def test_where_it_has_no_meaning():
    schedule = from_orders(TWO)
    wrong = "delayed=1 is not a bool; give True or False, or None for what is faster"
    assert refusal(lower, schedule, delayed=1) == wrong
    assert refusal(simulate, schedule, clock="lockstep", delayed=1) == wrong


# --- tables ---


def test_what_stays_on_its_rank_is_stored_at_once():
    """The last stage's own output, and messages between neighbours on one rank."""
    fold = [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    program = lower(from_orders(fold), keep="residuals", pattern="single", delayed=True)
    # 0F0 | | 1F0 | 2F0 | | 3F0 | 3B0 | | 2B0 | 1B0 | | 0B0: two slots from rank to rank, else one.
    busy = program.op[:, 0] > 0
    assert np.flatnonzero(busy[:, 0]).tolist() == [0, 5, 6, 11]
    assert np.flatnonzero(busy[:, 1]).tolist() == [2, 3, 8, 9]
    check_program(program)


# --- proofs ---


def turned(delayed: bool) -> Program:
    """A program that says of itself what it is not."""
    program = lower(from_orders(TWO), pattern="single", delayed=delayed)
    return replace(program, delayed=not delayed)


def test_a_program_cannot_hide_what_it_is():
    tail = "; this program would compute something else, so lower the schedule again"
    assert refusal(check_program, turned(True)) == (
        "program of schedule 'custom': tick 0, slot 0, rank 1: the output of stage 0 for "
        f"microbatch 0: expected a free buffer, found buffer 2: discard{tail}"
    )
    assert refusal(check_program, turned(False)) == (
        "program of schedule 'custom': tick 0, slot 0, rank 1, channel 0: shift 1 brings nothing, "
        f"which no action reads: expected discard, buffer 2, found buffer 0{tail}"
    )


# --- what the docs say ---


def test_the_table_of_ratios():
    """bench/notes/kernel.md: makespan with delayed sends over that without, S = 8, M = 32."""
    text = KERNEL.read_text(encoding="utf-8").split("## Sends beside work", 1)[1]
    head, *rows = re.findall(r"^\| (.*) \|$", text.split("The table counts", 1)[0], re.MULTILINE)
    comms = [float(cell) for cell in head.split(" | ")[2:]]
    said = [row.split(" | ") for row in rows if row[0] == "`"]
    assert len(said) == 6
    for name, meet, *cells in said:
        schedule = build(name.strip("`"), num_ranks=8, num_microbatches=32)
        options = {"partners": {"all": False, "partners": True}[meet]}
        found = [
            late(schedule, Costs(comm=c), **options).makespan
            / simulate(schedule, Costs(comm=c), "lockstep", **options).makespan
            for c in comms
        ]
        assert [f"{value:.2f}" for value in found] == cells
