"""Embedding and head shared by all ranks: in the tables, on symbols, and under the clocks.

Letters: S ranks, M microbatches, V chunks per rank.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import schedules
from schedules import (
    Costs,
    ScheduleError,
    build,
    check_program,
    differences,
    from_orders,
    lower,
    simulate,
)
from schedules.lowering.program import COMMON
from tests.support.sizes import CHUNKS, is_legal
from tests.support.tables import assert_no_entry_can_change, tables, with_tables

BOTH = ("embed", "head")
SHARED = [("embed",), ("head",), BOTH]
KEEPS = ["input", "residuals"]
PATTERNS = list(schedules.clocks.ticks.PATTERNS)
TAIL = "; this program would compute something else, so lower the schedule again"
TWO = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="two")
ONE = from_orders([["0F0", "0B0", "0F1", "0B1"]], name="one")


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
def test_every_family_is_proved(name):
    """Each size in another pattern and with other parts shared."""
    turns = itertools.cycle(itertools.product(PATTERNS, SHARED, KEEPS))
    for S, M, V in itertools.product((1, 2, 3, 4), (1, 3, 4, 8), (1, 2)):
        if not is_legal(name, S, M, V) or CHUNKS.get(name, V) != V:
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=S * V)
        for pattern, shared, keep in itertools.islice(turns, 3):
            program = lower(schedule, keep=keep, pattern=pattern, shared=shared)
            assert program.shared == shared
            assert check_program(program, ascending=True) is program
            forward = lower(schedule.forward(), shared=shared)
            assert check_program(forward).shared == shared
            assert (forward.common.scatter == -1).all()


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("schedule", [TWO, ONE], ids=lambda s: s.name)
def test_no_entry_can_change(schedule, shared):
    program = check_program(lower(schedule, pattern="single", shared=shared))
    assert_no_entry_can_change(program, (*COMMON, "operand", "gradient", "arrival"), lowest=-2)


def edited(program, column, at, value):
    table = tables(program)[column].copy()
    table[at] = value
    return with_tables(program, **{column: table})


PROGRAM = lower(TWO, pattern="single", shared=BOTH)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            edited(PROGRAM, "head", (1, 0), 1),
            (
                "tick 1, slot 0, rank 1: table 'head', the output of the last stage of microbatch "
                "0 is there: expected 0, found 1"
            ),
        ),
        (
            edited(PROGRAM, "head", (2, 0), 0),
            (
                "tick 2, slot 0, rank 1: table 'head', the output of the last stage is not there: "
                "expected -1, found 0"
            ),
        ),
        (
            edited(PROGRAM, "scatter", (5, 0), -1),
            (
                "tick 5, slot 0, rank 0: table 'scatter', the gradient of the first stage of "
                "microbatch 1 is there: expected 1, found -1"
            ),
        ),
        (
            edited(PROGRAM, "lookup", (1, 0), -1),
            (
                "tick 1, slot 0, rank 0: 0F1 reads its operand from buffer 1: expected the "
                "embedding of microbatch 1, found nothing"
            ),
        ),
        (
            edited(PROGRAM, "lookup", (2, 0), 0),
            (
                "tick 2, slot 0, rank 0: the embedding of microbatch 0: expected a free buffer, "
                "found buffer 3: discard"
            ),
        ),
        (
            edited(PROGRAM, "lookup", (5, 0), 0),
            (
                "tick 5, slot 0, rank 0: the embedding of microbatch 0, which no action reads: "
                "expected -1"
            ),
        ),
        (
            edited(PROGRAM, "gradient", (2, 0, 1), 1),
            (
                "tick 2, slot 0, rank 1: 1B0 reads its gradient from buffer 1: expected the head's "
                "gradient of microbatch 0, found the output of stage 0 for microbatch 1"
            ),
        ),
        (
            edited(PROGRAM, "head", (0, 0), 2),
            "tick 0, slot 0: table 'head': expected -1..1, found 2",
        ),
        (
            with_tables(PROGRAM, scatter=PROGRAM.common.scatter[:-1]),
            "table 'scatter': expected int32 of shape (6, 1), found int32 of shape (5, 1)",
        ),
        (
            with_tables(PROGRAM, head=np.full_like(PROGRAM.common.head, -1)),
            (
                "tick 1, slot 0, rank 1: Op(kind='F', chunk=0, first=False, last=False) runs stage "
                "1 of 2: expected first=False, last=True"
            ),
        ),
    ],
)
def test_the_message_says_where_and_what(program, message):
    with pytest.raises(ScheduleError) as caught:
        check_program(program)
    assert str(caught.value) == f"program of schedule 'two': {message}{TAIL}"


@pytest.mark.parametrize(
    ("shared", "given"), [("tail", "'tail'"), (3, "3"), (("head", 1), "('head', 1)")]
)
def test_parts_that_do_not_exist(shared, given):
    for function in (lower, lambda s, shared: simulate(s, clock="lockstep", shared=shared)):
        with pytest.raises(ScheduleError) as caught:
            function(TWO, shared=shared)
        assert str(caught.value) == (
            f"shared={given}: ranks can share 'embed', 'head', or both; give those of them that "
            f"are split by vocabulary, such as shared=('embed', 'head')"
        )
    assert lower(TWO, shared="head").shared == ("head",)
    assert lower(TWO, shared=["head", "embed"]).shared == BOTH


# --- clocks ---


def test_ends_take_their_time_on_the_end_stages():
    costs = Costs(f=1, i=2, w=4, head=10, embed=0.5)
    assert costs.table(3)[:, 0].tolist() == [1.5, 6.5, 2.5, 4]
    assert costs.table(3)[:, 1].tolist() == [1, 6, 2, 4]
    assert costs.table(3)[:, 2].tolist() == [1, 16, 12, 4]
    assert costs.table(3, ("head",))[:, 2].tolist() == [1, 6, 2, 4]
    assert costs.table(3, BOTH)[:, 0].tolist() == [1, 6, 2, 4]
    assert costs.table(1)[:, 0].tolist() == [1.5, 16.5, 12.5, 4]


@pytest.mark.parametrize("partners", [False, True])
@pytest.mark.parametrize(("S", "M"), [(1, 3), (2, 4), (4, 6)])
def test_shared_work_is_added_when_all_meet(S, M, partners):
    """Paired ticks: (M + S - 1)(F + B), and each microbatch's ends in parts of 1 / S."""
    schedule = build("eager_1f1b", num_ranks=S, num_microbatches=M)
    costs = Costs(f=2, i=2, w=2, head=8, embed=1)
    report = simulate(schedule, costs, "lockstep", shared=BOTH, partners=partners)
    assert report.makespan == pytest.approx((M + S - 1) * 6 + M * (8 + 2) / S)
    assert report.work == pytest.approx((M * 6 + M * 10 / S,) * S)
    assert report.idle == pytest.approx([report.makespan - work for work in report.work])
    assert report.shared == BOTH
    forward = simulate(schedule.forward(), costs, "lockstep", shared=BOTH)
    assert forward.makespan == pytest.approx((M + S - 1) * 2 + M * (8 + 1) / S)


@pytest.mark.parametrize(
    ("name", "M", "ratio"),
    [("eager_1f1b", 16, 0.748), ("eager_1f1b", 32, 0.734), ("zb_h1", 16, 0.729)],
)
def test_the_numbers_of_the_documentation(name, M, ratio):
    schedule = build(name, num_ranks=4, num_microbatches=M)
    costs = Costs(f=4, i=4, w=4, head=7.2)
    spans = [
        simulate(schedule, costs, "lockstep", shared=shared).makespan for shared in (("head",), ())
    ]
    assert f"{spans[0] / spans[1]:.3f}" == str(ratio)
    text = (Path(__file__).parents[2] / "bench" / "notes" / "meshes.md").read_text(encoding="utf-8")
    assert str(ratio) in text


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("comm", [0.5, 3])
def test_of_two_ranks_each_is_the_other_s_partner(delayed, comm):
    """An exchange that joins all is a barrier, whether or not it keeps only whom it joins."""
    schedule = build("eager_1f1b", num_ranks=2, num_microbatches=6)
    costs = Costs(1, (1, 2), 1, comm, head=1.5, embed=0.5)
    options = {"pattern": "paired", "delayed": delayed, "shared": BOTH}
    one, other = (
        simulate(schedule, costs, "lockstep", partners=p, **options) for p in (False, True)
    )
    assert one.makespan == pytest.approx(other.makespan)


@pytest.mark.parametrize("clock", ["event", "lockstep"])
def test_a_run_with_shared_work_differs_from_its_prediction_by_nothing(clock):
    costs = Costs(f=[1, 2], i=1, w=1, head=0.5, embed=0.25)
    report = simulate(
        build("1f1b", num_ranks=2, num_microbatches=4), costs, clock=clock, shared=("head",)
    )
    assert not any(each.more for each in differences(report).found)
    with pytest.raises(ScheduleError) as caught:
        differences(report, simulate(build("1f1b", num_ranks=2, num_microbatches=4), costs))
    assert str(caught.value).startswith("predicted has shared=(), and measured ('head',): work")
