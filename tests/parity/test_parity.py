"""A pipeline computes what the model computes without one, whatever the schedule.

Stages and head divide by the norm of their input, so that anything computed from a bubble's zeros
is NaN: were it read by anyone, every number here would be NaN.

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from schedules import from_orders
from tests.support import models
from tests.support.grids import covering, pairs
from tests.support.models import Block, Hostile, Layered, Readout, Sliced, Tree, Words
from tests.support.poison import poison  # noqa: F401, a fixture

RANKS, MICROBATCHES = (1, 2, 4, 8), (1, 2, 3, 8, 17)
FAMILIES = ("gpipe", "1f1b", "eager_1f1b")
REMATS, ENGINES = ("stage", None), ("scan", "programs")

FACTORS = (RANKS, MICROBATCHES, FAMILIES, REMATS, ENGINES)
GRID = list(itertools.product(*FACTORS))


FAST_TRIPLES = ((4, 3, "stage", "scan"),)


# Every two values meet, S and M aside: all those meet in CI.
FAST = frozenset(covering(GRID, itertools.product(RANKS, MICROBATCHES)))


@functools.cache
def chosen(*factors) -> frozenset:
    """Few combinations in which every two values of different factors meet."""
    return frozenset(covering(itertools.product(*factors)))


def effort(S, M, family, remat, engine) -> list[pytest.MarkDecorator]:
    """Every pair of values is tested in CI."""
    if (S, M, family, remat, engine) in FAST:
        return []
    if (S, M, family, remat, engine) in chosen(*FACTORS):
        return [pytest.mark.slow]
    return [pytest.mark.slow, pytest.mark.exhaustive]


def together(S, M, _family, remat, engine) -> pytest.MarkDecorator:
    """Cases that share their runs go to the same process, where `run` remembers them."""
    return pytest.mark.xdist_group(f"{S}-{M}-{remat}-{engine}")


def cases() -> list:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[together(*case), *effort(*case)])
        for case in GRID
    ]


def triples() -> list:
    """Results that agree in all families; one family in `make test`."""
    return [
        pytest.param(
            *case,
            marks=[
                together(*case[:2], None, *case[2:]),
                *([] if case in FAST_TRIPLES else effort(*case[:2], None, *case[2:])),
            ],
        )
        for case in itertools.product(RANKS, MICROBATCHES, REMATS, ENGINES)
    ]


@functools.cache
def batch() -> tuple:
    """Words and labels. 816 rows are a multiple of M * D in every case, so one reference serves."""
    return models.words(816), models.words(816, most=models.CLASSES, seed=4)


def ends() -> dict:
    return {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}


@functools.cache
def wanted(K: int, kind=Hostile):
    """Results of the model without a pipeline."""
    stages = models.build(kind, K)
    return models.reference(stages, *batch(), models.cross_entropy, **ends())


@functools.cache
def run(S: int, M: int, family: str, remat, engine: str):
    """One case of the grid: the pipeline, and its loss and gradients."""
    pipe = Pipeline(
        models.build(Hostile, S),
        M,
        schedule=family,
        mesh=make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        remat=remat,
        engine=engine,
        **ends(),
    )
    found = jax.device_get(pipe.value_and_grad(*batch()))
    return pipe, found


def check(pipe: Pipeline, *, kind=Hostile) -> None:
    """A pipeline of stages and the `ends` against the unpipelined model."""
    want = wanted(pipe.schedule.num_stages, kind)
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), want)


def test_the_models_are_hostile():
    (stage,) = models.build(Hostile, 1)
    assert np.isnan(stage(jnp.zeros((1, models.WIDTH)))).all()
    assert np.isnan(ends()["head"](jnp.zeros((1, models.WIDTH)))).all()


def test_a_wrong_row_does_not_hide_behind_a_large_one():
    wanted = np.array([[1.0, -20.0], [0.0, 2e-4], [0.0, 0.0]])
    for row, wrong in ((0, 1e-3), (1, 1e-5), (2, 1e-5)):
        found = wanted.copy()
        found[row, 0] += wrong
        assert models.row_error(found, wanted) > 1e-5, row
        assert models.distance(found, wanted) == models.row_error(found, wanted)
    assert models.row_error(wanted * (1 + 1e-6), wanted) < 1e-5
    assert np.isnan(models.row_error(np.full(2, np.nan), np.ones(2)))


def test_the_cases_hold_every_pair_of_values():
    every = set().union(*map(pairs, GRID))
    sizes = set().union(*map(pairs, itertools.product(RANKS, MICROBATCHES)))
    assert set().union(*map(pairs, FAST)) >= every - sizes
    assert set().union(*map(pairs, FAST | chosen(*FACTORS))) == every
    assert len(GRID) == 240
    assert len(FAST) <= 18


@pytest.mark.parametrize(("S", "M", "family", "remat", "engine"), cases())
def test_the_grid(S, M, family, remat, engine):
    pipe, found = run(S, M, family, remat, engine)
    assert (pipe.schedule.name, pipe.schedule.num_ranks) == (family, S)
    models.assert_matches(pipe, found, wanted(S))


@pytest.mark.slow
@pytest.mark.parametrize(("S", "M", "remat", "engine"), triples())
def test_the_loss_is_bit_identical_between_schedules(S, M, remat, engine):
    losses = [run(S, M, family, remat, engine)[1][0] for family in FAMILIES]
    assert len({loss.tobytes() for loss in losses}) == 1, losses


# --- stages, ranks and devices ---


@pytest.mark.few
@pytest.mark.parametrize(
    ("S", "V", "M", "family", "remat"),
    [
        (2, 2, 3, "1f1b", "stage"),
        pytest.param(2, 3, 4, "eager_1f1b", None, marks=pytest.mark.slow),
        pytest.param(4, 2, 6, "gpipe", None, marks=pytest.mark.slow),
        pytest.param(2, 2, 3, "eager_1f1b", "stage", marks=pytest.mark.slow),
        (2, 3, 2, "1f1b", None),
        pytest.param(1, 2, 3, "gpipe", None, marks=pytest.mark.slow),
    ],
)
def test_several_stages_per_rank(S, V, M, family, remat):
    pipe = Pipeline(
        models.build(Hostile, V * S),
        M,
        schedule=family,
        mesh=make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        remat=remat,
        **ends(),
    )
    assert pipe.schedule.num_stages == V * S
    check(pipe)


@pytest.mark.few
@pytest.mark.parametrize(
    ("S", "D", "M", "family", "remat"),
    [
        (2, 2, 3, "1f1b", "stage"),
        pytest.param(4, 2, 8, "eager_1f1b", None, marks=pytest.mark.slow),
        (1, 8, 2, "gpipe", "stage"),
    ],
)
def test_data_shards(S, D, M, family, remat):
    pipe = Pipeline(
        models.build(Hostile, S),
        M,
        schedule=family,
        mesh=make_mesh(stage=S, data=D),
        loss_fn=models.cross_entropy,
        remat=remat,
        **ends(),
    )
    check(pipe)


@pytest.mark.parametrize(("K", "S"), [(3, 3), pytest.param(16, 8, marks=pytest.mark.slow)])
def test_without_a_mesh_as_many_devices_as_share_the_stages(K, S):
    pipe = Pipeline(models.build(Hostile, K), 3, loss_fn=models.cross_entropy, **ends())
    assert dict(pipe.mesh.shape) == {"data": 1, "stage": S}
    check(pipe)


def test_a_mesh_of_one_axis():
    mesh = Mesh(np.array(jax.devices()[2:4]), ("stage",))
    pipe = Pipeline(models.build(Hostile, 2), 3, mesh=mesh, loss_fn=models.cross_entropy, **ends())
    check(pipe)


@pytest.mark.filterwarnings("ignore:the mesh axis")
def test_an_axis_that_a_pipeline_does_not_use():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "data", "other"))
    pipe = Pipeline(models.build(Hostile, 2), 3, mesh=mesh, loss_fn=models.cross_entropy, **ends())
    check(pipe)


def test_a_stacked_module_is_the_list_of_its_stages():
    stages = models.build(Hostile, 4)
    graphdef, _ = nnx.split(stages[0])
    stacked = nnx.merge(
        graphdef, jax.tree.map(lambda *xs: jnp.stack(xs), *(nnx.state(s) for s in stages))
    )
    a, b = (
        Pipeline(given, 3, schedule="1f1b", mesh=make_mesh(stage=2), loss_fn=models.cross_entropy)
        for given in (stages, stacked)
    )
    assert nnx.graphdef(a.chunks) == nnx.graphdef(b.chunks)
    for x, y in zip(*(jax.tree.leaves(nnx.state(pipe)) for pipe in (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding == y.sharding


# --- what a stage keeps ---


@pytest.mark.parametrize(
    "policy",
    [
        "dots_saveable",
        pytest.param("nothing_saveable", marks=pytest.mark.slow),
        pytest.param("everything_saveable", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_policies(policy):
    pipe = Pipeline(
        models.build(Hostile, 2),
        3,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=models.cross_entropy,
        remat=getattr(jax.checkpoint_policies, policy),
        **ends(),
    )
    check(pipe)


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        pytest.param(Block, jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow),
        pytest.param(Layered, "stage", marks=pytest.mark.slow),
        (Layered, None),
        (Layered, jax.checkpoint_policies.dots_saveable),
        (Sliced, None),
    ],
)
def test_kinds_of_stages(kind, remat):
    """A plain MLP, a scan over layers, weights taken by static slices."""
    pipe = Pipeline(
        models.build(kind, 2),
        3,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=models.cross_entropy,
        remat=remat,
        **ends(),
    )
    check(pipe, kind=kind)


@pytest.mark.parametrize("remat", [None, pytest.param("stage", marks=pytest.mark.slow)])
def test_activations_that_are_trees(remat):
    M, K = 3, 4
    x = {
        "row": models.rows(2 * M),
        "gate": models.rows(2 * M, seed=1),
        "kind": models.words(2 * M, most=3),
    }
    t = models.rows(2 * M, seed=2)

    def loss_fn(outputs, targets):
        return models.squares(outputs["row"], targets) + jnp.mean(
            outputs["kind"].astype(jnp.float32)
        )

    stages = models.build(Tree, K)
    want = models.reference(stages, x, t, loss_fn)
    pipe = Pipeline(
        stages,
        M,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=loss_fn,
        remat=remat,
    )
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


# --- timetables that nobody has a name for ---


def any_schedule(seed: int, *, S: int, K: int, M: int, split: float) -> schedules.Schedule:
    """A legal schedule picked at random: actions run as soon as a die says so.

    Args:
      split: the probability that a backward is I and W.
    """
    rng = random.Random(seed)
    placement = [k % S for k in range(K)]
    rng.shuffle(placement)
    ready, orders = [(0, "F", m) for m in range(M)], [[] for _ in range(S)]
    while ready:
        k, kind, m = ready.pop(rng.randrange(len(ready)))
        orders[placement[k]].append(f"{k}{kind}{m}")
        if kind == "F" and k + 1 < K:
            ready.append((k + 1, "F", m))
        if kind == "F" and k + 1 == K:
            ready.append((k, "I" if rng.random() < split else "B", m))
        if kind in "BI" and k > 0:
            ready.append((k - 1, "I" if rng.random() < split else "B", m))
        if kind == "I":
            ready.append((k, "W", m))
    return from_orders(orders, name=f"any {seed}")


@pytest.mark.few
@pytest.mark.parametrize(
    ("seed", "S", "K", "M", "split", "remat", "engine"),
    [
        (1, 3, 3, 4, 0.0, "stage", "scan"),
        pytest.param(2, 2, 6, 3, 0.0, None, "scan", marks=pytest.mark.slow),
        pytest.param(3, 3, 3, 4, 1.0, "stage", "scan", marks=pytest.mark.slow),
        (4, 2, 4, 3, 0.5, None, "scan"),
        (5, 3, 6, 3, 0.5, "stage", "scan"),
        pytest.param(6, 2, 4, 4, 1.0, None, "scan", marks=pytest.mark.slow),
        *(
            pytest.param(
                100 + n, S, K, M, split, remat, engine, marks=pytest.mark.slow, id=f"more-{n}"
            )
            for n, ((S, K, M), split, remat, engine) in enumerate(
                covering(
                    itertools.product(
                        [(4, 8, 3), (3, 9, 4), (5, 5, 8), (1, 3, 4)],
                        (0.0, 0.5, 1.0),
                        REMATS,
                        ENGINES,
                    )
                )
            )
        ),
    ],
)
def test_any_legal_schedule(seed, S, K, M, split, remat, engine):
    schedule = any_schedule(seed, S=S, K=K, M=M, split=split)
    kinds = {action.kind for order in schedule.orders for action in order}
    assert kinds == {0.0: {"F", "B"}, 0.5: {"F", "B", "I", "W"}, 1.0: {"F", "I", "W"}}[split]
    pipe = Pipeline(
        models.build(Hostile, K),
        M,
        schedule=schedule,
        loss_fn=models.cross_entropy,
        remat=remat,
        engine=engine,
        **ends(),
    )
    assert pipe.schedule is schedule
    assert pipe.mesh.shape["stage"] == S
    check(pipe)


def test_a_timetable_from_a_file(tmp_path):
    """It says how many ranks there are, where no mesh does."""
    path = tmp_path / "mine.csv"
    schedule = any_schedule(8, S=2, K=2, M=3, split=0.5)
    schedule.to_csv(path)
    pipes = [
        Pipeline(
            models.build(Hostile, 2),
            3,
            schedule=given,
            mesh=mesh,
            loss_fn=models.cross_entropy,
            **ends(),
        )
        for given, mesh in ((path, make_mesh(stage=2)), (str(path), None))
    ]
    for pipe in pipes:
        assert pipe.schedule.name == "mine"
        assert pipe.schedule.orders == schedule.orders
        assert pipe.mesh.shape["stage"] == 2
    check(pipes[1])


# --- leaks ---


@pytest.mark.few
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.slow)])
def test_nobody_reads_what_nobody_wrote(remat):
    pipe = Pipeline(
        models.build(Hostile, 4),
        3,
        schedule=any_schedule(9, S=2, K=4, M=3, split=0.5),
        loss_fn=models.cross_entropy,
        remat=remat,
        **ends(),
    )
    check(pipe)


def test_a_poisoned_microbatch_stays_in_its_rows():
    """NaN in one microbatch: outputs and input gradients of all others do not change by a bit."""
    M = 4
    pipe = Pipeline(
        models.build(Hostile, 4),
        M,
        schedule="1f1b",
        mesh=make_mesh(stage=4),
    )
    clean = models.rows(2 * M)
    poisoned = clean.at[2:4].set(jnp.nan)  # microbatch 1

    def outputs_and_gradient(x):
        y, pullback = jax.vjp(pipe, x)
        return y, *pullback(jnp.ones_like(y))

    others = np.array([0, 1, 4, 5, 6, 7])
    for a, b in zip(outputs_and_gradient(clean), outputs_and_gradient(poisoned), strict=True):
        assert np.isnan(b[2:4]).all()
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
