"""Stages that are not alike compute what the model computes without a pipeline.

All models divide by norms, so that whatever is computed from padding, from a message of another
type or from a bubble is NaN. Letters as in `test_parity`.
"""

from __future__ import annotations

import functools
import itertools

import jax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import mixed, models
from tests.support.grids import covering, pairs
from tests.support.models import Hostile
from tests.support.poison import poison  # noqa: F401, a fixture

STAGES = {"images in 4": 4, "images in 8": 8, "10 layers": 4, "scanned": 4, "trees": 4}
FAMILIES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
CHUNKS = {"zb_h1": 1, "zb_v": 2}
FAST = (
    ("10 layers", 4, "eager_1f1b", None, "scan", 2),
    ("scanned", 2, "interleaved_1f1b", "stage", "scan", 1),
    ("trees", 2, "zb_v", "stage", "scan", 2),
    ("trees", 2, "zb_v", None, "programs", 1),
    ("images in 4", 4, "1f1b", "stage", "programs", 2),
)


def is_legal(name, S, family, remat, engine, D) -> bool:
    V = STAGES[name] // S
    return CHUNKS.get(family, V) == V and S * D <= 8


GRID = [
    case
    for case in itertools.product(
        STAGES, (1, 2, 4), FAMILIES, ("stage", None), ("scan", "programs"), (1, 2)
    )
    if is_legal(*case)
]
IMAGES = ("images in 4", 4, "1f1b", "stage", "scan", 1)
# Every two values meet but of the stages' kind and a family, which know nothing of each other.
ELSEWHERE = {(0, 2)}
SLOW = [
    IMAGES,
    *covering(GRID, (*FAST, IMAGES), ELSEWHERE),
    ("30 layers", 4, "1f1b", "stage", "scan", 1),
]


@functools.cache
def wanted(name: str):
    stages, (inputs, targets) = mixed.build(name), mixed.batch(name)
    return models.reference(stages, inputs, targets, mixed.loss_of(name))


def make(name: str, S: int, family="1f1b", remat="stage", engine="scan", D=1, **options):
    options.setdefault("loss_fn", mixed.loss_of(name))
    return Pipeline(
        mixed.build(name),
        4,
        schedule=family,
        mesh=make_mesh(stage=S, data=D),
        remat=remat,
        engine=engine,
        **options,
    )


def test_the_cases_hold_every_pair_of_values():
    cases = [case for case in (*FAST, *SLOW) if case[0] in STAGES]
    met = functools.partial(pairs, elsewhere=ELSEWHERE)
    assert set().union(*map(met, cases)) == set().union(*map(met, GRID))
    assert set(FAST) <= set(GRID)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "S", "family", "remat", "engine", "D"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_the_grid(name, S, family, remat, engine, D):
    pipe = make(name, S, family, remat, engine, D)
    models.assert_matches(pipe, pipe.value_and_grad(*mixed.batch(name)), wanted(name))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("name", "S", "family", "remat"),
    [
        pytest.param("trees", 2, "zb_v", None, marks=pytest.mark.slow),
        ("trees", 4, "1f1b", "stage"),
        pytest.param("images in 4", 4, "1f1b", None, marks=pytest.mark.slow),
        pytest.param("images in 8", 4, "zb_v", "stage", marks=pytest.mark.slow),
    ],
)
def test_nobody_reads_what_nobody_wrote(name, S, family, remat):
    """NaN in unwritten memory and messages, so also in the padding of those that are shared."""
    pipe = make(name, S, family, remat)
    models.assert_matches(pipe, pipe.value_and_grad(*mixed.batch(name)), wanted(name))


@pytest.mark.slow
def test_all_ways_to_ask_agree():
    name = "trees"
    pipe, (inputs, targets), want = make(name, 4), mixed.batch(name), wanted(name)
    loss, grads = nnx.value_and_grad(lambda m: m.loss(inputs, targets))(pipe)
    models.assert_matches(pipe, (loss, grads), want)
    assert models.distance(pipe.loss(inputs, targets), want[0]) < 1e-6
    plain = functools.partial(models.compose, mixed.build(name), None, None)
    assert models.distance(pipe(inputs), plain(inputs)) < 1e-5
    found, expected = (
        jax.grad(lambda x, f=f: models.squares(f(x), targets))(inputs) for f in (pipe, plain)
    )
    assert models.distance(found, expected) < 1e-5


def test_stages_of_equal_structure_whose_activations_are_not():
    """Pooling has no weights to differ in: what it is given makes the difference."""
    stages = [mixed.Halving(nnx.Rngs(k)) for k in range(4)]
    inputs, targets = models.rows(12, width=64), models.rows(12, width=4)
    want = models.reference(stages, inputs, targets, models.squares)
    pipe = Pipeline(stages, 3, mesh=make_mesh(stage=2), loss_fn=models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(inputs, targets), want)
    assert pipe(inputs).shape == (12, 4)


@pytest.mark.parametrize("remat", [pytest.param("stage", marks=pytest.mark.slow), None])
def test_weights_of_several_dtypes(remat):
    """bfloat16 weights lie in cells of their own; sums of their gradients stay float32."""
    stages = [
        mixed.Chain(*models.build(models.Half, 1), *models.build(Hostile, 1)),
        mixed.Chain(*models.build(Hostile, 2, seed=3)),
    ]
    inputs, targets = models.rows(12), models.rows(12, seed=1)
    want = models.reference(stages, inputs, targets, models.squares)
    pipe = Pipeline(
        stages, 3, mesh=make_mesh(stage=2), loss_fn=models.squares, remat=remat, schedule="1f1b"
    )
    found = pipe.value_and_grad(inputs, targets)
    models.assert_matches(pipe, found, want, tolerance=1e-2)  # rounded once, to bfloat16
    assert {str(g.dtype) for g in jax.tree.leaves(found[1])} == {"float32", "bfloat16"}
