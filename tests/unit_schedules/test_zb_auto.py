"""The zero-bubble paper's heuristic: its figures, its limits, and what it refuses."""

from __future__ import annotations

import itertools
import random

import pytest

from schedules import Costs, ScheduleError, build, check, simulate
from schedules.families.zero_bubble.zb_auto import variants, zb_auto

# Two settings of tables 9 and 5 of the paper (all are in `tests/published`): S, M, F, I, W and
# messages, heads and features of the model, and the bubble rate with memory for 2S inputs.
FIGURES = [
    (8, 24, Costs(18.522, 18.086, 9.337, 0.601), (24, 2304), 0.0433),
    (32, 256, Costs(10.402, 10.248, 7.698, 0.460), (48, 6144), 0.0018),
]
TOKENS = 1024


def weight_memory(heads: int, features: int) -> float:
    """Share of an input's memory, 34 + 5as/h, the 32 that W needs (table 1 of the paper)."""
    return 32 / (34 + 5 * heads * TOKENS / features)


def random_costs(rng: random.Random, S: int) -> Costs:
    f, i, w = ([rng.choice((0, 0.5, 1, 1.3, 2)) for _ in range(S)] for _ in range(3))
    return Costs(f, i, w, rng.choice((0, 0.1, 5)))


@pytest.mark.few
@pytest.mark.parametrize("unit", [1e-310, 1e-3, 1 / 7, 1 / 3, 60, 1000, 1e190])
def test_a_plan_does_not_depend_on_the_unit_of_time(unit):
    """Rounding errors broke ties: with the last of these times .0023 was idle (issue 56)."""
    for S, M, costs, model, figure in FIGURES:
        others = Costs(*(unit * time for time in (costs.f, costs.i, costs.w, costs.comm)))
        options = {"max_activations": 2 * S, "weight_memory": weight_memory(*model)}
        first, other = (zb_auto(S, M, S, costs=one, **options) for one in (costs, others))
        assert first.orders == other.orders
        assert round(simulate(first, costs).bubble_rate, 4) == figure
    # Times whose ratios have no decimals.
    options = {"max_activations": 4.5, "weight_memory": 0.63}
    times = [Costs(*(one * time for time in (5, 3, 5, 1))) for one in (1, unit)]
    first, other = (zb_auto(3, 3, 3, costs=costs, **options) for costs in times)
    assert first.orders == other.orders


@pytest.mark.parametrize(("S", "M", "costs", "model", "figure"), FIGURES[:1])
def test_inputs_held_until_w_cannot_reach_the_figure(S, M, costs, model, figure):
    """The bound of the docstring: with no more than 2S inputs until W, 9.4% are lost."""
    work = costs.f + costs.i + costs.w
    idle = (S - 1) * (costs.f + costs.i + 2 * costs.comm) - 2 * S * costs.w
    assert figure + 0.0005 < idle / (M * work + idle)
    report = simulate(build("zb_auto", num_ranks=S, num_microbatches=M, costs=costs), costs)
    assert max(report.peak_activations) <= 2 * S
    assert report.idle[0] >= idle


@pytest.mark.few
@pytest.mark.parametrize("S", [1, 2, 3, 5, 8])
def test_legal_within_the_limit_and_in_ascending_order(S):
    rng = random.Random(S)
    for M, limit in itertools.product((1, 2, 5, 9, 16), (1, 2, S, 2 * S - 1, 2 * S, float("inf"))):
        costs = random_costs(rng, S)
        found = variants(S, M, S, costs=costs, max_activations=limit)
        assert len(found) == 8
        for schedule in found.values():
            check(schedule, max_activations=limit)
            for order in schedule.orders:
                for kind in "FIW":
                    mine = [a.microbatch for a in order if a.kind == kind]
                    assert mine == list(range(M))


def test_the_best_variant_has_the_shortest_span():
    rng = random.Random(0)
    for _ in range(20):
        S = rng.randint(2, 6)
        costs = random_costs(rng, S)
        sizes = (S, 3 * S, S)
        best, *others = (
            max(simulate(schedule, costs).span)
            for schedule in (
                zb_auto(*sizes, costs=costs),
                *variants(*sizes, costs=costs).values(),
            )
        )
        assert best == pytest.approx(min(others))


def test_no_variant_is_superfluous():
    """Each of the three choices decides somewhere."""
    names = list(variants(2, 2, 2))
    assert names == [
        "zb_auto()",
        "zb_auto(fill)",
        "zb_auto(skip)",
        "zb_auto(skip, fill)",
        "zb_auto(late)",
        "zb_auto(late, fill)",
        "zb_auto(late, skip)",
        "zb_auto(late, skip, fill)",
    ]
    costs = Costs(f=1.0, i=1.3, w=0.8, comm=0.2)
    assert len(set(variants(5, 15, 5, costs=costs).values())) == 8


def test_with_equal_costs_and_memory_for_2s_there_is_no_bubble():
    for S in (2, 4, 8):
        report = simulate(zb_auto(S, 3 * S, S))
        assert max(report.idle) == 0
        assert report.makespan == 9 * S + S - 1


def refusal(**arguments) -> str:
    with pytest.raises(ScheduleError) as caught:
        zb_auto(**({"num_ranks": 4, "num_microbatches": 8, "num_stages": 4} | arguments))
    return str(caught.value)


def test_what_it_refuses():
    assert refusal(num_stages=8) == (
        "num_stages=8 with num_ranks=4: zb_auto is defined for one stage per rank; "
        "use num_stages=4, or another family"
    )
    assert refusal(max_activations=0.5) == (
        "max_activations=0.5 with num_ranks=4 and num_stages=4: a microbatch passes all 1 stages "
        "of a rank before its first gradient, so no schedule holds fewer than 1 stage inputs; use "
        "max_activations=1 or more"
    )
    for limit in (float("nan"), "8", True):
        assert refusal(max_activations=limit) == (
            f"max_activations={limit!r}: must be a number of stage inputs per rank, or None; give "
            f"how many fit into a rank's memory"
        )
    assert refusal(weight_memory=1.5) == (
        "weight_memory=1.5: is the part of a stage input's memory that is held from I to W; give "
        "a number from 0 to 1"
    )
    assert refusal(costs=Costs(f=[1, 2])) == (
        "Costs(f=(1, 2)) has 2 numbers for 4 stages; give one for each stage, or one number for all"
    )
