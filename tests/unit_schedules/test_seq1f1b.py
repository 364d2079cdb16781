"""Schedules of slices: the published order and formulas, rules, notation, clocks and programs.

Letters: S ranks, N slices, M microbatches.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import schedules
from schedules import Costs, ScheduleError
from schedules.tools.records import read_json, schedule_record, write_json

SIZES = list(itertools.product(range(1, 9), range(1, 9), (1, 2, 3, 5, 8, 12, 16)))


def build(S: int, N: int, M: int, name: str = "seq1f1b"):
    return schedules.build(name, num_ranks=S, num_microbatches=M, num_slices=N)


@pytest.mark.parametrize(
    "S", [1, 2, 4, *[pytest.param(S, marks=pytest.mark.slow) for S in (3, 5, 6, 7, 8)]]
)
def test_formulas(S):
    """Microbatches in flight, and fill and drain together, exactly, for N <= 8 and M <= 16."""
    for N, M in ((n, m) for s, n, m in SIZES if s == S):
        # Durations that divide by N, so that sums of floats are exact.
        costs = Costs(f=3.0 * 840, i=2.0 * 840, w=2.0 * 840)
        report = schedules.simulate(build(S, N, M), costs)
        whole = 7.0 * 840
        assert report.makespan == pytest.approx(M * whole + (S - 1) * whole / N, rel=1e-12), (N, M)
        peaks = [min(S - 1 - rank + N, M * N) / N for rank in range(S)]
        assert list(report.peak_activations) == pytest.approx(peaks), (N, M)
        split = schedules.simulate(build(S, N, M, "seq1f1b_zb"), costs)
        assert max(split.peak_activations) == pytest.approx(min(S - 1 + N, M * N) / N), (N, M)
        if M * N >= S + N - 1:
            fill = (S - 1) * (3.0 + 2.0 - 2.0) * 840 / N
            assert split.bubble_rate * max(split.span) == pytest.approx(fill), (N, M)


def test_one_slice_is_1f1b():
    for S, M in itertools.product((1, 2, 4), (1, 3, 8)):
        for name, plain in (("seq1f1b", "1f1b"), ("seq1f1b_zb", "zb_h1")):
            known = schedules.build(plain, num_ranks=S, num_microbatches=M)
            assert build(S, 1, M, name) == known


def test_the_order():
    s = build(2, 2, 2)
    assert " ".join(map(str, s.orders[0])) == "0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0"
    assert " ".join(map(str, s.orders[1])) == "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0"
    first = s.orders[1][1]
    assert (first.stage, first.kind, first.microbatch, first.slice) == (1, "F", 0, 1)
    assert schedules.Action.parse("1F0.1") == first != schedules.Action.parse("1F0")
    assert schedules.Action(1, "F", 0).slice is None
    assert first._replace(slice=0) == schedules.Action.parse("1F0.0")
    split = build(2, 2, 1, "seq1f1b_zb")
    assert " ".join(map(str, split.orders[1])) == "1F0.0 1F0.1 1I0.1 1I0.0 1W0.1 1W0.0"


def test_grid_and_files(tmp_path):
    """A grid, CSV and JSON carry slices, and read back as the same schedule."""
    s = build(2, 2, 1)
    assert str(s) == (
        "step        0      1      2      3      4      5\n"
        "rank 0  0F0.0  0F0.1      .      .  0B0.1  0B0.0\n"
        "rank 1      .  1F0.0  1F0.1  1B0.1  1B0.0      ."
    )
    for name in ("seq1f1b", "seq1f1b_zb"):
        s = build(3, 4, 2, name)
        s.to_csv(tmp_path / "s.csv")
        assert "1F0.3" in (tmp_path / "s.csv").read_text()
        assert schedules.Schedule.from_csv(tmp_path / "s.csv") == s
        write_json(s, tmp_path / "s.json")
        assert json.loads((tmp_path / "s.json").read_text())["num_slices"] == 4
        assert read_json(tmp_path / "s.json") == s
    assert "num_slices" not in schedule_record(
        schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    )


def test_programs():
    """Lowered, delayed or with shared ends, every value arrives where it is read."""
    for S, N, M in ((1, 2, 2), (2, 3, 2), (4, 4, 3)):
        for name, keep in itertools.product(("seq1f1b", "seq1f1b_zb"), ("input", "residuals")):
            s = build(S, N, M, name)
            for options in ({}, {"delayed": True}, {"shared": ("embed", "head")}):
                program = schedules.lower(s, keep=keep, **options)
                schedules.check_program(program)


def test_slices_that_take_different_times():
    """Shares in both clocks: later slices read more keys."""
    s = build(1, 2, 1)
    costs = Costs(f=4.0, i=4.0, w=0.0, slices=(1, 3))
    for clock in ("event", "lockstep"):
        report = schedules.simulate(s, costs, clock)
        assert report.makespan == pytest.approx(8.0)
        lasting = np.subtract(report.ends[0], report.starts[0])
        assert lasting.tolist() == pytest.approx([1.0, 3.0, 3.0, 1.0])
    equal = schedules.simulate(build(2, 2, 2), Costs(comm=2.0, embed=4.0, head=8.0))
    assert equal.ends[0][0] == pytest.approx((1 + 4) / 2)
    assert equal.starts[1][0] == pytest.approx((1 + 4) / 2 + 1)
    for clock in ("event", "lockstep"):
        ours = schedules.simulate(
            build(2, 2, 2), Costs(embed=4.0, head=8.0), clock, shared=("embed", "head")
        )
        assert sum(end - start for start, end in ours.common) == pytest.approx(2 * (8 + 2 * 4) / 2)


# --- errors ---


def message(call, *args, **options):
    with pytest.raises(ScheduleError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_slices_out_of_order():
    wrong = schedules.from_orders([["0F0.1", "0F0.0", "0B0.0", "0B0.1"]], name="mine")
    text = message(schedules.check, wrong)
    assert text.startswith(
        "schedule 'mine' (S=1 ranks, K=1 stages, M=1 microbatches, N=2 slices) has 2 faults\n"
        "- slices out of order in F: 0F0.1 (rank 0, step 0) before 0F0.0 (rank 0, step 1)\n"
        "  F of a slice reads the keys and values of the slices before it; run slices of a "
        "microbatch in ascending order\n"
        "- slices out of order in backward actions: 0B0.0 (rank 0, step 2) before 0B0.1 (rank 0, "
        "step 3)\n"
        "  B of a slice needs what later ones add to gradients of its keys: run slices of a "
        "microbatch in descending order\n"
    )


def test_actions_without_slices_among_those_with():
    wrong = schedules.from_orders([["0F0.0", "0F0.1", "0B0.1", "0B0"]], name="mine")
    text = message(schedules.check, wrong)
    assert "- no action of this schedule: 0B0 (rank 0, step 3)" in text
    assert "slices .0 to .1 (as 3F0.1), kinds F, B, I and W; correct it or take it out" in text
    assert "- missing: 0B0.0 (rank 0)" in text
    assert "once for every slice of every microbatch; add it" in text


def test_mutations_are_found():
    """A swap of any two neighbours of one stage's slices in F or in B is a fault."""
    s = build(2, 3, 2)
    for rank, order in enumerate(s.orders):
        for kind in "FB":
            places = [n for n, a in enumerate(order) if a.kind == kind]
            for a, b in itertools.pairwise(places):
                if order[a].microbatch != order[b].microbatch:
                    continue
                changed = list(order)
                changed[a], changed[b] = changed[b], changed[a]
                orders = [changed if r == rank else o for r, o in enumerate(s.orders)]
                assert "slices out of order" in message(
                    schedules.check, schedules.from_orders(orders)
                )


def test_sizes_that_do_not_fit():
    sizes = {"num_ranks": 2, "num_microbatches": 2}
    assert message(schedules.build, "seq1f1b", **sizes) == (
        "schedule='seq1f1b' without num_slices: it cuts every sequence into slices; give "
        "num_slices=2 or more, or choose '1f1b' for whole sequences"
    )
    assert message(schedules.build, "1f1b", **sizes, num_slices=2) == (
        "num_slices=2 with schedule='1f1b': this family runs whole sequences; leave it out, or "
        "choose one of seq1f1b, seq1f1b_zb"
    )
    assert message(schedules.build, "seq1f1b", **sizes, num_slices=0) == (
        "num_slices=0: must be an integer >= 1"
    )
    assert message(schedules.simulate, build(2, 2, 2), Costs(slices=(1, 2, 3))) == (
        "Costs(slices=(1, 2, 3)) has 3 numbers for 2 slices; give one for each slice, or None for "
        "equal ones"
    )
    assert message(schedules.check, build(2, 2, 2), max_activations=1.0).split("\n")[1] == (
        "- more than max_activations=1.0 stage inputs held at once: rank 0 holds up to 1.5, from "
        "0F1.0 (rank 0, step 2) on"
    )
