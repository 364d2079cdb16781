"""Halves of backwards made whole where that loses nothing: gains, limits, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from schedules import Costs, Schedule, ScheduleError, build, check, from_orders, simulate
from schedules.build import names, split_names
from schedules.search.auto import auto
from schedules.search.merge import joined, merge
from schedules.search.problem import pose
from tests.support.sizes import CHUNKS, is_legal
from tests.unit_schedules.test_auto import draw, families, see_that_it_is_legal


def kinds(schedule: Schedule) -> set[str]:
    return {action.kind for order in schedule.orders for action in order}


def test_the_families_that_split_are_those_with_halves():
    for name in names():
        V = CHUNKS.get(name, 1)
        schedule = build(name, num_ranks=2, num_microbatches=4, num_stages=2 * V)
        assert (name in split_names()) == ("W" in kinds(schedule)), name


# What the TPU compiler writes for two layers a stage on v5e, in millions of cycles; V times a
# stage takes a V-th.
def v5e(V: int) -> Costs:
    return Costs(1.18 / V, 1.48 / V, 1.41 / V, 0.02, b=2.63 / V)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "V", "M", "split", "merged"),
    [
        ("zb_v", 2, 16, 0.859, 0.886),
        ("zb_v", 2, 32, 0.896, 0.940),
        ("zb_h1", 1, 32, 0.865, 0.867),
        ("zb_h2", 1, 32, 0.879, 0.898),
    ],
)
def test_what_it_gains_at_the_cycles_of_a_tpu(name, V, M, split, merged):
    sizes = {"num_ranks": 8, "num_microbatches": M, "num_stages": 8 * V}
    before = simulate(build(name, **sizes), v5e(V))
    after = simulate(check(build(name, **sizes, costs=v5e(V), merge=True)), v5e(V))
    assert before.against_ideal == pytest.approx(split, abs=1e-3)
    assert after.against_ideal >= merged
    assert after.schedule.name == f"{name}, merged"


def see_that_no_rank_holds_more(before: Schedule, after: Schedule) -> None:
    """At the end of each F, I and B: inputs, and what I left for W."""

    def most(schedule: Schedule, taken: str, freed: str) -> list[int]:
        steps = [[(a.kind in taken) - (a.kind in freed) for a in o] for o in schedule.orders]
        return [int(np.cumsum(row).max()) for row in steps]

    for taken, freed in (("F", "BI"), ("I", "W"), ("F", "BW")):
        for more, less in zip(most(before, taken, freed), most(after, taken, freed), strict=True):
            assert less <= more


def test_it_is_never_slower_and_holds_no_more():
    rng = random.Random(5)
    merges = gains = 0
    for _ in range(25):
        S, M, K, costs = draw(rng)
        for schedule in families(S, M, K):
            after = merge(schedule, costs)
            see_that_it_is_legal(after)
            see_that_no_rank_holds_more(schedule, after)
            old, new = (simulate(one, costs).makespan for one in (schedule, after))
            assert new <= old * (1 + 1e-8)
            merges += after.orders != schedule.orders
            gains += new < old * (1 - 1e-6)
    assert merges > 30
    assert gains > 15


def test_by_hand():
    """On one rank nobody waits: every backward is whole, or none if B is dearer."""
    schedule = build("zb_h1", num_ranks=1, num_microbatches=3)
    assert kinds(merge(schedule)) == {"F", "B"}
    assert merge(schedule, Costs(b=2.5)).orders == schedule.orders
    # 1B0 would end at 3.9 and keep the first rank waiting, 1I0 ends at 3; 0B0 keeps nobody.
    two = build("zb_h1", num_ranks=2, num_microbatches=1)
    assert [list(map(str, order)) for order in merge(two, Costs(b=1.9)).orders] == [
        ["0F0", "0B0"],
        ["1F0", "1I0", "1W0"],
    ]


def test_w_that_are_owed_come_before_the_whole_backward():
    """Each stage adds up its microbatches in ascending order."""
    order = "0F0", "0F1", "0F2", "0I0", "0I1", "0I2", "0W0", "0W1", "0W2"
    schedule = check(from_orders([order]))
    problem = pose(schedule.placement, 1, 3, Costs(), math.inf)
    (codes,) = problem.encode(schedule)
    found = problem.decode("joined", [joined(problem, codes, {1})])
    assert list(map(str, found.orders[0])) == (
        ["0F0", "0F1", "0F2", "0I0", "0W0", "0B1", "0I2", "0W2"]
    )


@pytest.mark.parametrize("pair", [None, 2.2])
def test_overlapped_pairs_stay_pairs(pair):
    costs = Costs(b=1.8, pair=pair)
    schedule = build("dualpipe_v", num_ranks=4, num_microbatches=10, num_stages=8)
    # Halves of a pair may be merged too: here the backward of every pair is I, its W put off.
    rows, pairs = [], []
    for order, opening in zip(schedule.orders, schedule.pairs, strict=True):
        inside = {order[p + 1] for p in opening}
        late = [a._replace(kind="W") for a in order if a in inside]
        changed = [a._replace(kind="I") if a in inside else a for a in order]
        rows.append((*changed, *late))
        pairs.append(opening)
    torn = replace(schedule, orders=tuple(rows), pairs=tuple(pairs))
    for before in (schedule, check(torn)):
        after = check(merge(before, costs))
        assert sum(map(len, after.pairs)) == sum(map(len, before.pairs))
        assert simulate(after, costs).makespan <= simulate(before, costs).makespan * (1 + 1e-9)
        see_that_no_rank_holds_more(before, after)
    assert after.orders != torn.orders


def refusal(name: str, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        build(name, num_ranks=2, num_microbatches=4, **options)
    return str(caught.value)


def test_what_it_refuses():
    known = ", ".join(split_names())
    assert refusal("1f1b", merge=True) == (
        f"merge=True with schedule='1f1b': it has no halves of backwards to merge; leave it out, "
        f"or choose one of {known}"
    )
    assert refusal("auto", merge=True) == (
        f"merge=True with schedule='auto': it tries that by itself; leave it out, or choose one "
        f"of {known}"
    )
    assert refusal("zb_h1", merge=1) == "merge=1 is not a bool; give True or False"
    assert refusal("zb_h1", costs=Costs()).startswith("costs=Costs(")
    assert refusal("zb_h1", merge=True, costs=3).startswith("costs=3 is not a Costs; ")


@pytest.mark.few
@pytest.mark.parametrize("clock", ["event", "lockstep"])
def test_auto_is_never_worse_than_a_family_merged_or_not(clock):
    rng = random.Random(6)
    hybrids = 0
    for _ in range(6):
        S, V, M = rng.choice(((2, 1, 4), (3, 1, 6), (2, 2, 4), (4, 1, 8), (2, 2, 7)))
        i, w, comm = rng.uniform(0.7, 1.6), rng.uniform(0.4, 1.2), rng.choice((0, 0.05, 0.2))
        costs = Costs(1, i, w, comm, b=rng.uniform(0.8, 1) * (i + w))
        limit = rng.choice((V * S, math.inf))
        choice = auto(S, M, S * V, costs=costs, max_activations=limit, clock=clock, budget=100)
        hybrids += kinds(choice.schedule) == set("FBIW")
        for name in names():
            if not is_legal(name, S, M, V) or name == "zb_auto":
                continue
            for merged in {False, name in split_names()}:
                sizes = {"num_ranks": S, "num_microbatches": M, "num_stages": S * V}
                given = {"costs": costs} if merged else {}
                schedule = build(name, **sizes, **given, merge=merged)
                report = simulate(schedule, costs, clock)
                if max(report.peak_activations) <= limit:
                    assert choice.report.makespan <= report.makespan * (1 + 1e-9), name
    assert hybrids >= 2
