"""Interleaving in rounds of ``group`` microbatches: sizes, formulas, and how `auto` uses it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import schedules
from schedules import Costs, Schedule, ScheduleError, auto, build, check, check_program, simulate
from schedules.families import GROUPED
from schedules.families.constructions.sizes import rounds
from tests.support.groups import with_weights_at_once
from tests.support.sizes import is_legal

# Costs with W <= F <= I, for which the idle time of interleaved_zb is exact.
EQUAL, USUAL, SHORT_W = Costs(), Costs(f=3, i=4, w=2.5), Costs(f=3, i=3, w=2)


def groups(S: int) -> range:
    """Every size of a round."""
    return range((S + 1) // 2, S + 1)


def made(name: str, S: int, V: int, M: int, g: int, **options) -> Schedule:
    return build(name, num_ranks=S, num_microbatches=M, num_stages=S * V, group=g, **options)


def idle_of_halves(S: int, V: int, g: int, costs: Costs) -> float:
    """Idle time of interleaved_zb, as its docstring has it."""
    f, i, w = costs.f, costs.i, costs.w
    idle = (S - 1) * (f + i - w)
    if V > 1:
        idle += (V - 1) * ((S - g) * f + max(0, S * i - g * (i + w)))
        idle += max(0, (S - g - 1) * w + (S - g) * max(0, i - f) - (2 * g - S) * f)
    return idle


def idle_of_wholes(S: int, V: int, g: int, costs: Costs, n: int) -> float:
    """Idle time of interleaved_1f1b, as its docstring has it."""
    f, b = costs.f, costs.i + costs.w
    waits = max(0, S * max(f, b) - g * (f + b))
    return (S - 1 + (V - 1) * (S - g)) * (f + b) + (V - 1) * (n - 1) * waits


def flows(S: int, g: int, costs: Costs) -> bool:
    """True if a round takes as long as a microbatch needs to pass all ranks."""
    return S * max(costs.f, costs.i) <= g * (costs.f + costs.i + costs.w)


def sweep(most_ranks: int, most_chunks: int):
    for S, V in itertools.product(range(1, most_ranks + 1), range(1, most_chunks + 1)):
        for g in groups(S):
            yield S, V, g


SWEEPS = [(6, 3), pytest.param((12, 4), marks=pytest.mark.slow)]


@pytest.mark.few
@pytest.mark.parametrize("limits", SWEEPS)
def test_idle_time_and_peak_of_halves(limits):
    for S, V, g in sweep(*limits):
        for n, costs in itertools.product((2, 3), (EQUAL, USUAL, SHORT_W)):
            report = simulate(check(made("interleaved_zb", S, V, n * g, g)), costs)
            assert report.peak_activations == (min((V - 1) * g + S, V * n * g),) * S
            if flows(S, g, costs):
                wanted = idle_of_halves(S, V, g, costs)
                assert report.idle[0] == max(report.idle) == pytest.approx(wanted)


@pytest.mark.few
@pytest.mark.parametrize("limits", SWEEPS)
def test_idle_time_and_peak_of_whole_backwards(limits):
    for S, V, g in sweep(*limits):
        for n, costs in itertools.product((1, 2, 3), (EQUAL, USUAL, Costs(f=2, i=1, w=1))):
            report = simulate(check(made("interleaved_1f1b", S, V, n * g, g)), costs)
            peak = tuple(min((V - 1) * g + S - r, V * n * g) for r in range(S))
            assert report.peak_activations == peak
            assert report.idle[0] == max(report.idle)
            assert report.idle[0] == pytest.approx(idle_of_wholes(S, V, g, costs, n))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(5, 3), (9, 4)])
def test_rounds_that_differ_idle_no_more_than_the_smallest(limits):
    for S, V, g in sweep(*limits):
        for M, costs in itertools.product(range(1, 3 * S + 2), (EQUAL, USUAL)):
            sizes = rounds("interleaved_zb", S, M, g)
            assert sum(sizes) == M
            assert max(sizes) - min(sizes) <= 1
            assert len(sizes) == 1 or 2 * min(sizes) >= S
            if M % g == 0 and g < M:
                assert set(sizes) == {g}
            least, most = min(*sizes, S), max(sizes)
            whole = simulate(check(made("interleaved_1f1b", S, V, M, g)), costs)
            halves = simulate(check(made("interleaved_zb", S, V, M, g)), costs)
            assert max(halves.peak_activations) == min((V - 1) * most + S, V * M)
            assert max(whole.peak_activations) == min((V - 1) * most + S, V * M)
            assert max(whole.idle) <= idle_of_wholes(S, V, least, costs, len(sizes)) + 1e-9
            if len(sizes) > 1 and flows(S, least, costs):
                assert max(halves.idle) <= idle_of_halves(S, V, least, costs) + 1e-9


@pytest.mark.parametrize(
    ("S", "M", "g", "sizes"),
    [
        (4, 8, 2, (2, 2, 2, 2)),
        (8, 16, 6, (6, 5, 5)),
        (8, 9, 5, (5, 4)),
        (8, 10, 4, (5, 5)),  # 4, 3 and 3 would have fewer than S / 2
        (8, 30, 4, (5, 5, 4, 4, 4, 4, 4)),
        (8, 3, 4, (3,)),
        (4, 9, 4, (3, 3, 3)),
    ],
)
def test_rounds_of_a_group(S, M, g, sizes):
    assert rounds("interleaved_zb", S, M, g) == sizes


@pytest.mark.parametrize(("M", "g", "idle"), [(32, 4, 22), (32, 5, 19), (30, 5, 16)])
def test_a_larger_round_idles_less(M, g, idle):
    assert max(simulate(made("interleaved_zb", 8, 4, M, g)).idle) == idle


def test_rounds_of_all_ranks_are_the_default_of_halves():
    for S, V, n in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)):
        one = build("interleaved_zb", num_ranks=S, num_microbatches=n * S, num_stages=S * V)
        assert made("interleaved_zb", S, V, n * S, S).orders == one.orders


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED)
def test_every_number_of_microbatches_is_legal_and_lowers(name, tmp_path):
    for S, V, M in itertools.product((2, 3, 4), (1, 2), range(1, 10)):
        for g in groups(S):
            schedule = made(name, S, V, M, g)
            assert schedule.name == f"{name}, group={g}"
            assert check(schedule) is schedule
            for keep in ("input", "residuals"):
                check_program(schedules.lower(schedule, keep=keep))
            if is_legal(name, S, M, V) and M > S:
                half = schedules.lower(schedule, keep="residuals", offload=0.5)
                check_program(half)
    schedule.to_csv(tmp_path / "grouped.csv")
    assert Schedule.from_csv(tmp_path / "grouped.csv").orders == schedule.orders


def test_halves_lose_nothing_in_lockstep_at_equal_costs():
    for S, V, g in [(4, 2, 2), (4, 4, 3), (8, 2, 4), (5, 3, 3)]:
        schedule = made("interleaved_zb", S, V, 3 * g, g)
        lockstep = simulate(schedule, clock="lockstep")
        assert lockstep.makespan == pytest.approx(simulate(schedule).makespan)


@pytest.mark.parametrize(
    ("S", "V", "M", "idle", "at_once"), [(4, 4, 16, 10, 12), (8, 4, 32, 22, 26), (8, 8, 32, 38, 42)]
)
def test_weight_gradients_fill_more_than_right_after_their_input_gradients(S, V, M, idle, at_once):
    """The table of bench/notes/schedules.md: ours, and the published schedule."""
    schedule = made("interleaved_zb", S, V, M, S // 2)
    assert max(simulate(schedule).idle) == idle
    assert max(simulate(check(with_weights_at_once(schedule))).idle) == at_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "V", "M", "idle", "searched"),
    [
        (4, 4, 16, 10, 18),
        pytest.param(8, 4, 32, 22, 45, marks=pytest.mark.slow),
        pytest.param(8, 8, 32, 38, 128, marks=pytest.mark.slow),
    ],
)
def test_auto_takes_smaller_rounds_where_memory_is_short(S, V, M, idle, searched):
    """The table of bench/notes/schedules.md; the search without rounds leaves more time idle."""
    limit = (V - 1) * S // 2 + S
    choice = auto(S, M, S * V, max_activations=limit, budget=0)
    assert choice.won == f"interleaved_zb, group={S // 2}"
    assert choice.report.makespan == 3 * M * V + idle
    assert choice.candidates[0].peak == limit
    others = [c for c in choice.candidates if c.schedule and "group" not in c.name]
    assert min(c.makespan for c in others if c.peak <= limit) == 3 * M * V + searched
    # The largest rounds that fit; none where the usual ones do.
    more = auto(S, M, S * V, max_activations=limit + V - 1, budget=0)
    assert more.won == f"interleaved_zb, group={S // 2 + 1}"
    assert not [c for c in auto(4, 8, 8, budget=0).candidates if "group" in c.name]


def refusal(name: str, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        build(name, **({"num_ranks": 8, "num_microbatches": 16, "num_stages": 16} | options))
    return str(caught.value)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [3, 9, 0, -4, 4.0, True, "4", np.float32(4)])
def test_a_round_has_half_to_all_ranks(name, value):
    assert refusal(name, group=value) == (
        f"group={value!r} with num_ranks=8: a round of {name} has an integer from num_ranks / 2 to "
        f"num_ranks of microbatches; use group=4 to 8, or leave it out"
    )


def test_a_round_of_one_rank_has_one_microbatch():
    assert refusal("interleaved_zb", num_ranks=1, group=2) == (
        "group=2 with num_ranks=1: a round of interleaved_zb has an integer from num_ranks / 2 to "
        "num_ranks of microbatches; use group=1, or leave it out"
    )


@pytest.mark.parametrize("name", [*(n for n in schedules.names() if n not in GROUPED), "auto"])
def test_other_families_have_no_rounds(name):
    why = "tries that by itself" if name == "auto" else "has no rounds of microbatches"
    assert refusal(name, group=4) == (
        f"group=4 with schedule={name!r}: it {why}; leave it out, or choose one of "
        f"interleaved_1f1b, interleaved_zb"
    )
