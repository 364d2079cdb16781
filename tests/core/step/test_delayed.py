"""The kernel with delayed sends computes what the model computes, and nothing reads a bubble.

All memory that the kernel has not written, and every message that nobody sent, is NaN. Letters:
S ranks, V chunks per rank, M microbatches, D data shards.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from schedules import ScheduleError
from tests.parity.test_parity_families import nearest
from tests.support import mixed, models
from tests.support.grids import covering, effort, pairs
from tests.support.models import Block, Hostile, Readout, Words
from tests.support.poison import poison  # noqa: F401, a fixture
from tests.support.sizes import CHUNKS

GRID = [
    (name, *case)
    for name in schedules.names()
    for case in itertools.product((2, 4), (1, 2), ("stage", None))
    if CHUNKS.get(name, case[1]) == case[1]
]
FAST = [
    ("eager_1f1b", 2, 1, "stage"),
    ("eager_1f1b", 4, 1, None),
    ("zb_v", 2, 2, None),
]
# Every two values meet but of a family and another (tests/parity/test_parity_families.py has them):
# nothing that delays a message knows the family.
ELSEWHERE = {(0, place) for place in (1, 2, 3, 4)}
SLOW = covering(GRID, FAST, ELSEWHERE)


def cases() -> list:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=effort(case, FAST, SLOW))
        for case in GRID
    ]


def test_the_grid_is_covered():
    done = [*FAST, *SLOW]
    assert set(done) <= set(GRID)
    met = functools.partial(pairs, elsewhere=ELSEWHERE)
    assert set().union(*map(met, done)) == set().union(*map(met, GRID))
    assert len(done) <= 25


def ends() -> dict:
    return {"embed": Words(nnx.Rngs(501)), "head": Readout(nnx.Rngs(502))}


@functools.cache
def wanted(K: int, M: int):
    return models.reference(models.build(Hostile, K), *batch(M), models.cross_entropy, **ends())


def batch(M: int) -> tuple:
    return models.words(2 * M), models.words(2 * M, most=models.CLASSES, seed=4)


def make(name, S: int, V: int, M: int, **options) -> Pipeline:
    return Pipeline(
        models.build(Hostile, V * S),
        M,
        schedule=name,
        mesh=options.pop("mesh", None) or make_mesh(stage=S),
        loss_fn=models.cross_entropy,
        **ends(),
        **{"delayed": True, **options},
    )


@pytest.mark.few
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("name", "S", "V", "remat"), cases())
def test_loss_and_gradients(name, S, V, remat):
    M = nearest(name, S, V, S + 1)
    pipe = make(name, S, V, M, remat=remat)
    assert pipe.plan.training.delayed
    models.assert_matches(pipe, pipe.value_and_grad(*batch(M)), wanted(V * S, M))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    "pattern", ["partner", *(pytest.param(p, marks=pytest.mark.slow) for p in ("single", "unit"))]
)
def test_every_pattern(pattern):
    pipe = make("zb_h1", 2, 1, 4, pattern=pattern)
    models.assert_matches(pipe, pipe.value_and_grad(*batch(4)), wanted(2, 4))


INFERENCES = [(4, 1), pytest.param(2, 2, marks=pytest.mark.slow)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("S", "V"), INFERENCES)
def test_a_loss_without_gradients(S, V):
    pipe = make("gpipe", S, V, 3)
    assert pipe.plan.forward.delayed
    assert models.distance(pipe.loss(*batch(3)), wanted(V * S, 3)[0]) <= 1e-5


@pytest.mark.parametrize(("S", "V"), INFERENCES)
def test_outputs(S, V):
    inputs, _ = batch(3)
    plain = models.compose(models.build(Hostile, V * S), **ends(), inputs=inputs)
    assert models.distance(make("gpipe", S, V, 3)(inputs), plain) <= 1e-5


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("model", "schedule", "remat"),
    [
        pytest.param("trees", "eager_1f1b", "stage", marks=pytest.mark.slow),
        pytest.param("images in 4", "zb_h1", None, marks=pytest.mark.slow),
        pytest.param("images in 8", "zb_v", "stage", marks=pytest.mark.slow),
        pytest.param("trees", "eager_1f1b", None, marks=pytest.mark.slow),
    ],
)
def test_stages_that_are_not_alike(model, schedule, remat):
    stages, data, loss_fn = mixed.build(model), mixed.batch(model), mixed.loss_of(model)
    pipe = Pipeline(
        stages,
        4,
        schedule=schedule,
        mesh=make_mesh(stage=4),
        loss_fn=loss_fn,
        remat=remat,
        delayed=True,
    )
    want = models.reference(stages, *data, loss_fn)
    models.assert_matches(pipe, pipe.value_and_grad(*data), want)


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_data_shards():
    pipe = make("1f1b", 2, 1, 3, mesh=make_mesh(stage=2, data=2))
    data = models.words(12), models.words(12, most=models.CLASSES, seed=4)
    want = models.reference(models.build(Hostile, 2), *data, models.cross_entropy, **ends())
    models.assert_matches(pipe, pipe.value_and_grad(*data), want)


@pytest.mark.slow
def test_numbers_are_those_of_prompt_sends_bit_for_bit():
    """Each rank's order is the same, and so is what it adds."""
    found = [
        jax.tree.leaves(make("eager_1f1b", 2, 1, 4, delayed=late).value_and_grad(*batch(4)))
        for late in (False, True)
    ]
    assert all((a == b).all() for a, b in zip(*found, strict=True))


# --- what the compiler is given ---


def step(S: int, **options):
    """The jaxpr of a training step."""
    stages = models.build(Block, 2)
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=S), loss_fn=models.squares, **options)
    x = jnp.zeros((8, models.WIDTH))
    return jax.make_jaxpr(pipe.value_and_grad)(x, x).jaxpr


def inner(jaxpr):
    """Jaxprs within a jaxpr."""
    for eqn in jaxpr.eqns:
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            body = getattr(sub, "jaxpr", sub)
            if hasattr(body, "eqns"):
                yield body
                yield from inner(body)


def rests_on_work(S: int, **options) -> list[bool]:
    """True for every exchange in the scan over ticks whose operand follows from a slot's work."""
    found = []
    for jaxpr in inner(step(S, **options)):
        made = set()
        for eqn in jaxpr.eqns:
            operands = {v for v in eqn.invars if not hasattr(v, "val")}
            if eqn.primitive.name == "ppermute":
                found.append(bool(operands & made))
            if eqn.primitive.name == "while" or operands & made:
                made.update(eqn.outvars)
    return found


def test_an_exchange_rests_on_no_work_of_its_slot():
    """In *single* ticks a message is carried to the next tick, and exchanged before anything."""
    assert rests_on_work(2, pattern="single") == [True]
    assert rests_on_work(2, pattern="single", delayed=True) == [False]


def test_on_one_rank_nothing_is_different():
    assert str(step(1, delayed=True)) == str(step(1))
    assert str(step(2, delayed=True)) != str(step(2))


# --- what it says ---


def test_describe():
    late, prompt = (make("zb_h1", 4, 1, 8, delayed=d).describe() for d in (True, False))
    assert set(late.splitlines()) - set(prompt.splitlines()) == {
        "22 ticks of slots F + BIW: the fastest where exchanges are barriers",
        (
            "predicted bubble at F = I = W and F again in each backward: a step loses 43.4% of "
            "its ranks' time in lockstep with delayed sends"
        ),
        (
            "sends are delayed: a message travels beside the work of the next slot, and can be "
            "used from the one after"
        ),
    }
    assert "delayed" not in prompt
    assert "delayed" not in make("gpipe", 1, 2, 4).describe()  # no message leaves the rank


def test_the_default_schedule_is_one_that_can_wait(monkeypatch):
    """1f1b, the default where only partners meet, would take a third longer."""
    monkeypatch.setattr("pipeline.core.options.resolve.exchanges_are_barriers", lambda mesh: False)
    assert make(None, 4, 1, 8, delayed=False).schedule.name == "1f1b"
    assert make(None, 4, 1, 8).schedule.name == "eager_1f1b"


def test_what_is_no_answer():
    with pytest.raises(ScheduleError) as caught:
        make("gpipe", 2, 1, 4, delayed="yes")
    assert str(caught.value) == "delayed='yes' is not a bool; give True or False"
