"""Every family: legal at every size, its docstring's formulas, and its grid to read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

import schedules
from schedules import Costs, ScheduleError, build, check, simulate
from schedules.core.grid import grid
from schedules.families.constructions import v_slots
from tests.support.sizes import CHUNKS, LEAST, MICROBATCHES, RANKS, ROUNDS, is_legal, sizes

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = list(itertools.product(RANKS, MICROBATCHES))
MORE_CHUNKS = [pytest.param(V, marks=pytest.mark.slow) for V in (3, 4)]
COSTS = Costs(f=3.0, i=4.0, w=2.5)
F, B = 3.0, 6.5

PEAK = {
    "gpipe": lambda S, M, r: M,
    "1f1b": lambda S, M, r: min(S - r, M),
    "eager_1f1b": lambda S, M, r: min(2 * (S - 1 - r) + 1, M),
}
LOOPED_PEAK = {
    "gpipe": lambda S, M, V, r: M * V,
    "interleaved_1f1b": lambda S, M, V, r: min(
        2 * (S - 1 - r) + (V - 1) * (M // max(1, M // S)) + 1, M * V
    ),
    "looped_bfs": lambda S, M, V, r: M * V,
}
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")
SPLIT = {  # with one stage per rank: the most W that fill the bubble, and peak activations
    "zb_h1": (lambda S: S - 1, lambda S, M, r: min(S, M)),
    "zb_h2": (lambda S: 2 * (S - 1), lambda S, M, r: min(2 * S - 1, M)),
}


@functools.cache
def made(name: str, S: int, M: int, V: int) -> schedules.Schedule:
    """Built once for all tests."""
    return build(name, num_ranks=S, num_microbatches=M, num_stages=V * S)


@pytest.mark.few
@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("num_chunks", [1, 2, *MORE_CHUNKS])
def test_legal_at_every_size(name, num_chunks):
    for S, M in sizes(name, num_chunks):
        schedule = made(name, S, M, num_chunks)
        assert check(schedule) is schedule
        assert check(schedule.forward()).is_forward
        assert (schedule.name, schedule.num_microbatches) == (name, M)
        if name in V_SHAPED:
            assert schedule.placement == (*range(S), *reversed(range(S)))
        else:
            assert schedule.placement == tuple(k % S for k in range(num_chunks * S))


@pytest.mark.parametrize("name", schedules.names())
def test_other_sizes_are_refused_and_legal_ones_never(name):
    for (S, M), V in itertools.product(SIZES, (1, 2, 3)):
        if not is_legal(name, S, M, V):
            refusal(name, num_ranks=S, num_microbatches=M, num_stages=V * S)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_idle_and_peak_activations(name):
    for S, M in SIZES:
        report = simulate(made(name, S, M, 1), COSTS)
        assert report.idle[0] == max(report.idle) == pytest.approx((S - 1) * (F + B))
        assert report.makespan == pytest.approx((M + S - 1) * (F + B))
        assert report.peak_activations == tuple(PEAK[name](S, M, r) for r in range(S))


@pytest.mark.few
@pytest.mark.parametrize("name", LOOPED_PEAK)
@pytest.mark.parametrize("num_chunks", [1, 2, *MORE_CHUNKS])
def test_idle_and_peak_activations_of_several_stages_per_rank(name, num_chunks):
    """Neither costs anything in lockstep, and chunks divide what their F and B take."""
    for S, M in sizes(name, num_chunks):
        schedule = made(name, S, M, num_chunks)
        report = simulate(schedule, COSTS)
        bubble = (S - 1 + (num_chunks - 1) * max(0, S - M)) * (F + B)
        assert report.idle[0] == max(report.idle) == pytest.approx(bubble)
        assert report.makespan == pytest.approx(M * num_chunks * (F + B) + bubble)
        assert report.peak_activations == tuple(
            LOOPED_PEAK[name](S, M, num_chunks, r) for r in range(S)
        )
        lockstep = simulate(schedule, COSTS, clock="lockstep")
        assert lockstep.makespan == pytest.approx(report.makespan)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("costs", [COSTS, Costs(f=4, i=3, w=1)])
def test_weight_gradients_fill_the_bubble(name, costs):
    most, peak = SPLIT[name]
    for S, M in SIZES:
        schedule = made(name, S, M, 1)
        report = simulate(schedule, costs)
        bubble = (S - 1) * (costs.f + costs.i) - min(most(S), M - 1) * costs.w
        assert max(report.idle) == pytest.approx(bubble)
        assert report.peak_activations == tuple(peak(S, M, r) for r in range(S))


@pytest.mark.few
@pytest.mark.parametrize("name", [*SPLIT, "interleaved_zb", "zb_v", "v_half", "v_min"])
def test_split_families_lose_nothing_in_lockstep_at_equal_costs(name):
    V = CHUNKS.get(name, 2)
    for S, M in sizes(name, V, ranks=(1, 2, 3, 5, 8), microbatches=(1, 2, 6, 8, 16)):
        schedule = made(name, S, M, V)
        lockstep = simulate(schedule, clock="lockstep")
        assert lockstep.makespan == pytest.approx(simulate(schedule).makespan)


@pytest.mark.few
@pytest.mark.parametrize("num_chunks", [1, 2, *MORE_CHUNKS])
def test_interleaved_zb_fills_the_bubble_of_interleaved_1f1b(num_chunks):
    for S, M in sizes("interleaved_zb", num_chunks):
        schedule = made("interleaved_zb", S, M, num_chunks)
        report = simulate(schedule, COSTS)
        if M >= S:
            assert max(report.idle) == pytest.approx((S - 1) * (COSTS.f + COSTS.i - COSTS.w))
        group = M // max(1, M // S)
        peak = min((num_chunks - 1) * group + S, num_chunks * M)
        assert report.peak_activations == (peak,) * S


def test_interleaved_zb_of_one_stage_per_rank_is_zb_h1():
    for S, M in sizes("interleaved_zb", 1):
        one, other = (made(name, S, M, 1) for name in ("zb_h1", "interleaved_zb"))
        assert one == other


@pytest.mark.few
@pytest.mark.parametrize("costs", [COSTS, Costs(f=3, i=4, w=1), Costs()])
def test_zb_v_leaves_a_bubble_only_where_costs_differ(costs):
    for S, M in sizes("zb_v", 2):
        schedule = made("zb_v", S, M, 2)
        report = simulate(schedule, costs)
        assert report.peak_activations == tuple(min(2 * S, M + 1 + r, 2 * M) for r in range(S))
        if M >= 2 * S - 1:
            assert max(report.idle) == pytest.approx(2 * (S - 1) * (costs.i - costs.w))
            if costs == Costs():
                assert report.makespan == 6 * M + (S - 1)


@pytest.mark.few
@pytest.mark.parametrize(
    "costs",
    [Costs(), Costs(f=4, i=3, w=1), Costs(f=4, i=3.5, w=2), Costs(f=2, i=3, w=2)],
)
def test_dualpipe_v_in_pairs_and_one_after_the_other(costs):
    f, i, w = costs.f, costs.i, costs.w
    b = i + w
    larger = [(8, 19), (8, 32), (5, 40)]
    for S, M in itertools.chain(sizes("dualpipe_v", 2), larger):
        schedule = made("dualpipe_v", S, M, 2)
        report = simulate(schedule, costs)
        late = max(0, (S - 1) * (i - f) - f)
        assert report.idle[0] == max(report.idle) == pytest.approx((S - 1) * (f + i - w) + late)
        assert report.makespan == pytest.approx(report.work[0] + report.idle[0])
        assert report.peak_activations == (2 * S + 1,) * S
        if late:
            continue
        for pair in (f + b, b, f / 2 + b):
            overlapped = simulate(schedule, dataclasses.replace(costs, pair=pair))
            bubble = (S - 1) * (2 * pair - b - 2 * w) + (f + b - pair if S > 1 else 0)
            assert overlapped.idle[0] == pytest.approx(max(overlapped.idle))
            assert overlapped.idle[0] == pytest.approx(bubble)
            assert overlapped.makespan == pytest.approx(overlapped.work[0] + bubble)
            if costs == Costs() and pair == f + b:
                assert bubble == (S - 1) * (pair + b - 3 * w)  # as published


CONTROLLED = {  # idle at F = I = W, and inputs held
    "v_half": (lambda S: 3 * S - (4 if S % 2 else 7), lambda S: 2 * ((S + 2) // 2)),
    "v_min": (lambda S: 4 * S - (5 if S % 3 else 7), lambda S: 2 * ((S + 4) // 3)),
}


@pytest.mark.parametrize("name", CONTROLLED)
def test_controlled_memory(name):
    idle, peak = CONTROLLED[name]
    for S, M in itertools.chain(sizes(name, 2), [(4, 40), (6, 40), (8, 40), (12, 30)]):
        report = simulate(made(name, S, M, 2))
        assert max(report.peak_activations) == min(peak(S), 2 * M)
        if M >= S > 2:
            assert report.idle[0] == max(report.idle) == idle(S)
            assert report.makespan == 6 * M + idle(S)


@pytest.mark.parametrize("name", CONTROLLED)
def test_more_microbatches_repeat_the_steady_state(name, monkeypatch):
    """A schedule built from few microbatches equals one built from all of them."""
    for S in (1, 2, 3, 4, 6, 8):
        M = 2 * S + 12
        short = made(name, S, M, 2)
        monkeypatch.setattr(v_slots, "distinct", lambda ranks, microbatches: microbatches)
        long = build(name, num_ranks=S, num_microbatches=M, num_stages=2 * S)
        assert long == short
        monkeypatch.undo()


def test_dualpipe_v_pairs_all_but_its_ends():
    for S, M in sizes("dualpipe_v", 2):
        schedule = made("dualpipe_v", S, M, 2)
        for rank, positions in enumerate(schedule.pairs):
            apart = rank == S - 1  # the last rank's first two do not overlap
            assert len(positions) == 2 * (M - 2 * S + rank + 1) - apart + (S - 1 - rank)


def test_zb_h2_ends_with_zb_h1_where_ranks_wait_for_each_other():
    """No rank of it idles between its first and its last action, and yet no step ends sooner."""
    for S, M in [(2, 3), (4, 8), (8, 16)]:
        one, two = (simulate(made(name, S, M, 1)) for name in ("zb_h1", "zb_h2"))
        assert max(two.idle) == 0 < max(one.idle)
        assert one.makespan == two.makespan == 3 * M + S - 1


def test_zb_h1_holds_what_1f1b_does_and_as_many_as_wait_for_their_weight_gradient():
    for S, M in SIZES:
        for rank, order in enumerate(made("zb_h1", S, M, 1).orders):
            held = {"I": 0, "W": 0}
            most = {"I": 0, "W": 0}
            for action in order:
                held["I"] += {"F": 1, "I": -1, "W": 0}[action.kind]
                held["W"] += {"F": 0, "I": 1, "W": -1}[action.kind]
                most = {kind: max(most[kind], held[kind]) for kind in held}
            assert most["I"] == min(S - rank, M)
            assert most["W"] == min(rank + 1, M)  # one of them runs in that moment


def test_eager_1f1b_takes_no_longer_in_lockstep():
    for S, M in SIZES:
        schedule = made("eager_1f1b", S, M, 1)
        report = simulate(schedule, COSTS, clock="lockstep", pattern="paired")
        assert report.makespan <= (M + S - 1) * (F + B) + 1e-9
        if M >= 2 * S - 1:  # else some slots are used by nobody, and take no time
            assert report.makespan == pytest.approx((M + S - 1) * (F + B))


def test_1f1b_takes_no_longer_in_lockstep_where_only_partners_meet():
    for S, M in SIZES:
        schedule = made("1f1b", S, M, 1)
        report = simulate(schedule, COSTS, "lockstep", pattern="partner", partners=True)
        assert report.makespan == pytest.approx((M + S - 1) * (F + B))


@pytest.mark.parametrize(
    ("name", "S", "K", "M"),
    [
        (name, S, K, M)
        for name in schedules.names()
        for S, K, M in [(4, 4, 6), (2, 4, 4)]
        if is_legal(name, S, M, K // S)
    ],
)
def test_the_grid_is_the_one_on_file(name, S, K, M):
    schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=K)
    file = GOLDEN / f"{name}_S{S}_K{K}_M{M}.txt"
    assert grid(schedule) == file.read_text(encoding="ascii").rstrip("\n")


def refusal(name="1f1b", **sizes) -> str:
    with pytest.raises(ScheduleError) as caught:
        build(name, **({"num_ranks": 2, "num_microbatches": 4} | sizes))
    return str(caught.value)


def test_an_unknown_family_names_the_nearest():
    assert refusal("1F1b") == (
        "schedule='1F1b' is not a known family; did you mean '1f1b' or 'eager_1f1b'? "
        "known: " + ", ".join(schedules.names())
    )
    assert refusal("zzz") == (
        "schedule='zzz' is not a known family; known: " + ", ".join(schedules.names())
    )


class Index:
    """An object that Python takes for an index, and nothing else."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("argument", ["num_ranks", "num_microbatches", "num_stages"])
@pytest.mark.parametrize(
    "value", [0, -1, 1.5, True, "4", np.int32(0), np.float32(2), np.True_, np.arange(2), [2]]
)
def test_sizes_are_positive_integers(argument, value):
    assert refusal(**{argument: value}) == f"{argument}={value!r}: must be an integer >= 1"


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, Index])
def test_sizes_may_be_integers_of_any_kind(number):
    found = schedules.build(
        "zb_v", num_ranks=number(2), num_microbatches=number(4), num_stages=number(4)
    )
    plain = schedules.build("zb_v", num_ranks=2, num_microbatches=4, num_stages=4)
    assert found == plain
    assert type(found.num_microbatches) is int
    assert {type(number) for order in found.orders for a in order for number in a} == {int, str}
    assert repr(schedules.check(found)) == repr(plain)


def test_every_rank_holds_as_many_stages():
    assert refusal(num_ranks=4, num_stages=6) == (
        "num_stages=6 is not a multiple of num_ranks=4: every rank holds the same number of "
        "stages; use num_stages=4 or 8, or another number of ranks"
    )
    assert refusal(num_ranks=4, num_stages=2) == (
        "num_stages=2 is not a multiple of num_ranks=4: every rank holds the same number of "
        "stages; use num_stages=4, or another number of ranks"
    )


ROUNDS_RULE = (
    "runs max(1, num_microbatches // num_ranks) = {rounds} rounds, all of the same number of "
    "microbatches; use num_microbatches={fewer} or {more}"
)


@pytest.mark.parametrize("name", sorted(ROUNDS))
@pytest.mark.parametrize(
    ("S", "M", "rounds", "fewer", "more"),
    [(4, 9, 2, 8, 10), (4, 11, 2, 10, 12), (4, 13, 3, 12, 15), (8, 31, 3, 30, 32)],
)
def test_rounds_are_of_equal_size(name, S, M, rounds, fewer, more):
    rule = ROUNDS_RULE.format(rounds=rounds, fewer=fewer, more=more)
    assert refusal(name, num_ranks=S, num_microbatches=M) == (
        f"num_microbatches={M} with num_ranks={S}: {name} {rule}"
    )
    for legal in (fewer, more):
        check(build(name, num_ranks=S, num_microbatches=legal))


@pytest.mark.parametrize("name", sorted(CHUNKS))
def test_stages_per_rank_that_a_family_is_not_defined_for(name):
    V = CHUNKS[name]
    each = "one stage" if V == 1 else f"{V} stages"
    assert refusal(name, num_ranks=4, num_stages=12) == (
        f"num_stages=12 with num_ranks=4: {name} is defined for {each} per rank; "
        f"use num_stages={4 * V}, or another family"
    )


@pytest.mark.parametrize("name", sorted(LEAST))
def test_fewer_microbatches_than_a_family_needs(name):
    assert refusal(name, num_ranks=4, num_stages=8, num_microbatches=7) == (
        f"num_microbatches=7: {name} runs at least 2 * num_ranks = 8 microbatches; use "
        f"num_microbatches=8 or more, or another family"
    )
