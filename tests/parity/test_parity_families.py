"""Every family computes what the model computes: the grid of all of them.

Their schedules reach what the grid of `test_parity` does not: W apart from I, several chunks that
alternate, neighbours on one rank, a loss on rank 0, overlapped pairs. Stages and head are hostile
to anything computed from a bubble, as there. Letters as in `test_parity`, V chunks.
"""

from __future__ import annotations

import functools
import itertools

import jax
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.grids import covering, effort, pairs
from tests.support.models import Hostile, Readout, Words
from tests.support.sizes import CHUNKS, is_legal

FULL = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs")  # families without I and W


def nearest(name: str, S: int, V: int, M: int) -> int:
    """The legal number of microbatches that is next to M."""
    return min(
        (m for m in range(1, 4 * S + 8) if is_legal(name, S, m, V)), key=lambda m: abs(m - M)
    )


def grid() -> list[tuple]:
    """(family, S, V, the M that was wanted, remat, engine)."""
    factors = ((2, 4, 8), (1, 2, 4), ("S", "2S", "2S+3"), ("stage", None), ("scan", "programs"))
    return [
        (name, *case)
        for name in schedules.names()
        for case in itertools.product(*factors)
        if CHUNKS.get(name, case[1]) == case[1]
    ]


GRID = grid()
# One case of every family, of the fewest stages and by either engine, in `make test`; every pair of
# values in CI.
FAST = [
    (name, 2 + 2 * (n % 3 == 1), CHUNKS.get(name, 1 + n % 2), "S" if n % 2 else "2S", remat, engine)
    for n, name in enumerate(schedules.names())
    for remat, engine in [(("stage", None)[n % 2], ("scan", "programs")[n // 2 % 2])]
]
SLOW = covering(GRID, FAST)


def cases() -> list:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=effort(case, FAST, SLOW))
        for case in GRID
    ]


@functools.cache
def batch(M: int) -> tuple:
    rows = 2 * M
    return models.words(rows), models.words(rows, most=models.CLASSES, seed=4)


def ends() -> dict:
    return {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}


@functools.cache
def wanted(K: int, M: int):
    return models.reference(models.build(Hostile, K), *batch(M), models.cross_entropy, **ends())


def run(schedule, S: int, V: int, M: int, remat, engine: str = "scan", **options):
    pipe = Pipeline(
        models.build(Hostile, V * S),
        M,
        schedule=schedule,
        mesh=make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        remat=remat,
        engine=engine,
        **options,
        **ends(),
    )
    return pipe, jax.device_get(pipe.value_and_grad(*batch(M)))


def test_the_grid_is_covered():
    assert {name for name, *_ in FAST} == set(schedules.names())
    assert set(FAST) <= set(GRID)
    assert set().union(*map(pairs, [*FAST, *SLOW])) == set().union(*map(pairs, GRID))
    assert len(GRID) == 36 * sum(1 if name in CHUNKS else 3 for name in schedules.names())
    assert len(SLOW) <= 3 * len(FAST)


@pytest.mark.parametrize(("name", "S", "V", "about", "remat", "engine"), cases())
def test_loss_and_gradients(name, S, V, about, remat, engine):
    M = nearest(name, S, V, {"S": S, "2S": 2 * S, "2S+3": 2 * S + 3}[about])
    pipe, found = run(name, S, V, M, remat, engine)
    assert (pipe.schedule.name, pipe.schedule.num_ranks) == (name, S)
    assert pipe.schedule.num_stages == V * S
    models.assert_matches(pipe, found, wanted(V * S, M))


HYBRIDS = [  # family, S, V, M, remat, engine; the first two in `make test`
    ("zb_v", 2, 2, 5, "stage", "scan"),
    ("zb_h2", 2, 1, 4, None, "scan"),
    ("zb_h1", 2, 1, 4, "stage", "programs"),
    ("zb_h1", 4, 1, 6, None, "scan"),
    ("interleaved_zb", 2, 2, 6, None, "scan"),
    ("interleaved_zb", 4, 2, 8, "stage", "programs"),
    ("zb_v", 4, 2, 9, None, "programs"),
    ("dualpipe_v", 2, 2, 6, None, "programs"),
    ("v_half", 2, 2, 8, "stage", "scan"),
    ("zb_auto", 4, 1, 8, None, "scan"),
]


@pytest.mark.few
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=effort(case, HYBRIDS[:2], []))
        for case in HYBRIDS
    ],
)
def test_loss_and_gradients_of_hybrids(case):
    """Timetables in which some backwards are whole and some in halves."""
    name, S, V, M, remat, engine = case
    sizes = {"num_ranks": S, "num_microbatches": M, "num_stages": V * S}
    schedule = schedules.build(name, **sizes, merge=True, costs=schedules.Costs(b=1.7))
    assert {a.kind for order in schedule.orders for a in order} == set("FBIW")
    pipe, found = run(schedule, S, V, M, remat, engine)
    models.assert_matches(pipe, found, wanted(V * S, M))


ROUNDS = [  # family, S, V, M, group, remat, engine, offload; the first in `make test`
    ("interleaved_zb", 4, 2, 5, 2, None, "scan", 0.5),
    ("interleaved_zb", 2, 4, 4, 1, None, "programs", None),
    ("interleaved_zb", 4, 2, 8, 3, "stage", "scan", None),
    ("interleaved_1f1b", 4, 2, 6, 3, None, "scan", "stash"),
    ("interleaved_1f1b", 2, 3, 4, 1, "stage", "programs", None),
    ("interleaved_1f1b", 4, 2, 8, 2, "stage", "scan", None),
]


@pytest.mark.few
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=effort(case, ROUNDS[:1], ROUNDS[1:]))
        for case in ROUNDS
    ],
)
def test_loss_and_gradients_of_smaller_rounds(case):
    """Interleaved timetables in rounds of ``group`` microbatches, with stashes on the host."""
    name, S, V, M, group, remat, engine, offload = case
    sizes = {"num_ranks": S, "num_microbatches": M, "num_stages": V * S}
    schedule = schedules.build(name, **sizes, group=group)
    pipe, found = run(schedule, S, V, M, remat, engine, offload=offload)
    assert pipe.schedule == schedule
    models.assert_matches(pipe, found, wanted(V * S, M))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.exhaustive)])
def test_losses_agree_between_families_and_runs(remat):
    """Bit for bit between families with a full B, and between runs; within 1e-6 for all."""
    cases = [(name, 2) for name in FULL] + [("interleaved_zb", 2), ("zb_v", 2), ("dualpipe_v", 2)]
    losses = {name: run(name, 2, V, 4, remat)[1][0] for name, V in cases}
    assert len({losses[name].tobytes() for name in FULL}) == 1, losses
    for name, V in cases:
        assert losses[name] == pytest.approx(losses["gpipe"], rel=1e-6)
        assert run(name, 2, V, 4, remat)[1][0].tobytes() == losses[name].tobytes()
