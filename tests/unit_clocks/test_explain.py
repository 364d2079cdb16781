"""Every moment of idle time has a cause, and the causes sum to the whole."""

from __future__ import annotations

import dataclasses

import pytest

import schedules
from schedules import Action, Costs, build, from_orders, simulate
from schedules.clocks.report import Wait
from tests.support.sizes import CHUNKS, is_legal

CLOCKS = [
    {"clock": "event"},
    {"clock": "lockstep"},
    {"clock": "lockstep", "pattern": "unit"},
    {"clock": "lockstep", "pattern": "partner", "partners": True},
    {"clock": "lockstep", "delayed": True},
    {"clock": "lockstep", "pattern": "paired", "partners": True, "delayed": True},
]


@pytest.mark.parametrize("options", CLOCKS)
@pytest.mark.parametrize("name", schedules.names())
def test_causes_sum_to_the_idle_time_exactly(name, options):
    V = CHUNKS.get(name, 2)
    for S, M in [(1, 3), (2, 5), (4, 4), (4, 8), (8, 16)]:
        if not is_legal(name, S, M, V):
            continue
        schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)
        f = [2 + k % 3 for k in range(V * S)]
        report = simulate(schedule, Costs(f=f, i=5, w=3, comm=1), **options)
        explained = report.explain()
        for rank in range(S):
            assert explained.total[rank] == report.makespan - report.work[rank]  # integers: exact
            assert sum(explained.parts[rank].values()) == explained.total[rank]
        has_lockstep = any(part["lockstep"] for part in explained.parts)
        assert has_lockstep <= (options["clock"] == "lockstep")


def test_what_a_rank_waits_for():
    schedule = from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    waits = simulate(schedule, Costs(f=2, i=3, w=1, comm=1)).explain().waits
    assert waits == (
        (
            Wait(4, 9, "fill", 2, Action(1, "B", 0)),
            Wait(9, 10, "communication", 2, Action(1, "B", 0)),
            Wait(14, 15, "drain", 3, Action(1, "B", 1)),
            Wait(15, 16, "communication", 3, Action(1, "B", 1)),
        ),
        (
            Wait(0, 2, "fill", 0, Action(0, "F", 0)),
            Wait(2, 3, "communication", 0, Action(0, "F", 0)),
            Wait(15, 20, "optimizer wait", None, None),
        ),
    )


def test_time_in_which_no_rank_works_is_told_from_waiting():
    """On two ranks, one microbatch: F, a message, F and B, a message, B."""
    report = simulate(build("1f1b", num_ranks=2, num_microbatches=1), Costs(comm=1))
    times = {row.cause: row.measured for row in schedules.differences(report, report).found}
    assert times["no rank works: exchanges, the loop over ticks, dispatch"] == 2 * 2
    assert [times[f"rank {rank} waits while others work"] for rank in range(2)] == [3, 3]


def test_a_report_prints_no_columns_of_actions():
    report = simulate(build("1f1b", num_ranks=2, num_microbatches=1))
    long = ("starts", "ends", "common", "moved")
    assert not [name for name in long if f"{name}=" in repr(report)]


def test_lockstep_makes_the_short_wait_for_the_long():
    """F beside B: the rank that runs F waits for the exchange, not for anybody's work."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=8)
    event = simulate(schedule)
    lockstep = simulate(schedule, clock="lockstep", pattern="single")
    assert event.explain().parts[1]["lockstep"] == 0
    # The last rank waits for nobody else; it loses what the step loses.
    assert lockstep.explain().parts[1]["lockstep"] == lockstep.makespan - event.makespan > 0


def test_a_heavy_head_is_an_imbalance():
    parts = (
        simulate(build("1f1b", num_ranks=2, num_microbatches=8), Costs(f=(1, 4))).explain().parts
    )
    assert parts[0]["imbalance"] > parts[0]["fill"] + parts[0]["drain"]
    assert parts[1]["imbalance"] == 0


def test_ranks_that_end_early_wait_for_the_optimizer():
    """ZB-H2 has no bubble inside any rank's span, and its step waits all the same."""
    report = simulate(build("zb_h2", num_ranks=4, num_microbatches=12))
    assert report.bubble_rate == 0 < report.step_bubble_rate
    parts = report.explain().parts
    assert [part["optimizer wait"] for part in parts] == [3, 2, 1, 0]
    assert [part["fill"] for part in parts] == [0, 1, 2, 3]


def test_a_report_explains_itself_as_a_table():
    report = simulate(build("gpipe", num_ranks=2, num_microbatches=2))
    assert str(report.explain()) == (
        "            work    fill  optimizer wait    idle\n"
        "rank 0     66.7%   33.3%            0.0%   33.3%\n"
        "rank 1     66.7%   11.1%           22.2%   33.3%"
    )


def test_a_report_is_printed_in_a_line_for_each_rank():
    """Issue 38: `print(pipe.trace(...))` was a repr of 60,000 characters."""
    schedule = build("gpipe", num_ranks=2, num_microbatches=3)
    named = dataclasses.replace(schedule, name="mine\x1b[2J")
    for one, name in ((schedule, "gpipe"), (named, "mine\\x1b[2J")):
        assert str(simulate(one)) == (
            f"{name}: 2 ranks, 2 stages, 3 microbatches; clock event, makespan 12, bubble 25.0% of "
            f"the step\n"
            "rank 0: works 9, waits 3, holds at most 3 activations\n"
            "rank 1: works 9, waits 3, holds at most 3 activations"
        )
    long = simulate(build("zb_h1", num_ranks=8, num_microbatches=200))
    assert max(map(len, str(long).splitlines())) < 120
