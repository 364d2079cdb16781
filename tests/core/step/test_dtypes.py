"""Dtypes that are not float32 and int32: words of few bits, and float64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.models import WIDTH, Block

MANY = 300  # words, more than 8 bits hold


@pytest.fixture
def wide() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def parity(tolerance, *, S=2, dtype=jnp.float32, rows=9, **options) -> Pipeline:
    stages = models.build(Block, 2, dtype=dtype)
    x, t = (models.rows(rows, seed=n).astype(dtype) for n in (0, 3))
    options.setdefault("loss_fn", models.squares)
    pipe = Pipeline(stages, 3, mesh=make_mesh(stage=S), **options)
    want = models.reference(stages, x, t, options["loss_fn"])
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want, tolerance=tolerance)
    return pipe


def pair(y, t):
    return jnp.sum((y - t) ** 2), jnp.asarray(len(y), y.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"remat": None, "schedule": "zb_h1"}, marks=pytest.mark.slow),
        pytest.param({"S": 1, "remat": None}, marks=pytest.mark.slow),
        {"loss_fn": pair},
    ],
    ids=["stage", "zb", "one rank", "weighted"],
)
def test_float64_is_exact_to_its_last_bits(wide, options):
    """A third is no float32: the loss, and what it is differentiated with, are float64."""
    parity(1e-14, dtype=jnp.float64, **options)


def test_float32_beside_float64(wide):
    pipe = parity(1e-5)
    grads = pipe.value_and_grad(*(models.rows(9, seed=n).astype(jnp.float32) for n in (0, 3)))[1]
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("S", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_inputs_of_float64_have_gradients(wide, S):
    """Microbatches are counted in int64 then."""
    stages = models.build(Block, 2, dtype=jnp.float64)
    pipe = Pipeline(stages, 3, mesh=make_mesh(stage=S), loss_fn=models.squares, remat=None)
    x, t = (models.rows(9, seed=n).astype(jnp.float64) for n in (0, 3))
    found = jax.grad(pipe.loss)(x, t)
    want = jax.grad(lambda x: models.squares(models.compose(stages, None, None, x), t))(x)
    assert models.distance(found, want) < 1e-14


def test_outputs_of_float64_are_differentiated_as_such(wide):
    stages = models.build(Block, 2, dtype=jnp.float64)
    pipe, x = Pipeline(stages, 3, mesh=make_mesh(stage=2)), models.rows(9)
    found = jax.grad(lambda x: jnp.sum(pipe(x) ** 2))(x)
    want = jax.grad(lambda x: jnp.sum(models.compose(stages, None, None, x) ** 2))(x)
    assert models.distance(found, want) < 1e-14


@pytest.mark.slow
def test_complex_outputs_are_differentiated():
    """The pairing with a cotangent must not drop imaginary parts."""

    class Turn(nnx.Module):
        def __call__(self, x):
            z = x.astype(jnp.complex64)
            return z * jnp.exp(1j * z)

    stages = models.build(Block, 2)
    pipe, x = Pipeline(stages, 3, mesh=make_mesh(stage=2), head=Turn()), models.rows(9)

    def size(y):
        return jnp.sum(jnp.abs(y - (0.3 + 0.4j)) ** 2)

    found = jax.grad(lambda x: size(pipe(x)))(x)
    want = jax.grad(lambda x: size(models.compose(stages, None, Turn(), x)))(x)
    assert models.distance(found, want) < 1e-5


def vocabulary(mode: str, dtype) -> float:
    embed = VocabularyEmbedding(MANY, WIDTH, rngs=nnx.Rngs(0))
    pipe = Pipeline(
        models.build(Block, 2),
        3,
        mesh=make_mesh(stage=2),
        embed=embed,
        head=VocabularyHead(MANY, WIDTH, tied=embed),
        loss_fn=CrossEntropy(),
        vocabulary=mode,
    )
    words = models.words(9, most=100).astype(dtype)
    return float(pipe.loss(words, words))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ends", "stage"])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint16])
def test_words_of_few_bits(mode, dtype):
    assert vocabulary(mode, dtype) == vocabulary(mode, jnp.int32)


@pytest.mark.slow
def test_a_shared_vocabulary_beside_float64(wide):
    found, want = (vocabulary(mode, jnp.int64) for mode in ("stage", "ends"))
    assert found == pytest.approx(want, rel=1e-6)


# --- typed random keys ---


class Keyed(nnx.Module):
    """Noise of a key for each row, which travels with the row."""

    def __init__(self, rngs: nnx.Rngs, *, more: bool = False):
        self.w, self.more = models.normal(rngs, WIDTH, WIDTH), more
        if more:
            self.b = models.normal(rngs, WIDTH)

    def __call__(self, x, *, flips=None):
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(x["key"])
        row = x["row"] + jnp.tanh(x["row"] @ self.w[...]) + noise(keys)
        row = row * (1 + self.b[...][None]) if self.more else row
        return {"key": keys, "row": row if flips is None else row * noise(flips)}


def noise(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)


def keyed(impl="threefry2x32"):
    return {"key": jax.random.split(jax.random.key(0, impl=impl), 8), "row": models.rows(8)}


def squares_of_rows(y, t):
    return models.squares(y["row"] + 0.1 * noise(y["key"]), t["row"] + noise(t["key"]))


SLOWLY = [
    {"remat": None},
    {"mesh": make_mesh(stage=2, data=2)},
    {"mesh": make_mesh(stage=1), "remat": None},
]


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remat": None, "schedule": "zb_h1"},
        *(pytest.param(options, marks=pytest.mark.slow) for options in SLOWLY),
    ],
)
def test_keys_in_activations_inputs_targets_and_extras(options):
    stages, x, t = models.build(Keyed, 2), keyed(), keyed()
    extras = {"flips": jax.random.split(jax.random.key(5), 8)}
    options = {"mesh": make_mesh(stage=2), **options}
    pipe = Pipeline(stages, 4, loss_fn=squares_of_rows, **options)
    want = models.reference(stages, x, t, squares_of_rows, extras=extras)
    models.assert_matches(pipe, pipe.value_and_grad(x, t, extras=extras), want)


@pytest.mark.slow
def test_keys_between_stages_that_are_not_alike():
    stages, x, t = [*models.build(Keyed, 1), Keyed(nnx.Rngs(9), more=True)], keyed(), keyed()
    pipe = Pipeline(stages, 4, loss_fn=squares_of_rows, mesh=make_mesh(stage=2))
    want = models.reference(stages, x, t, squares_of_rows)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


@pytest.mark.slow
@pytest.mark.parametrize("impl", [pytest.param("threefry2x32", marks=pytest.mark.slow), "rbg"])
def test_keys_as_outputs(impl):
    """Bits of an "rbg" key depend on what is drawn beside it in a `vmap`; keys do not."""
    stages, x = models.build(Keyed, 2), keyed(impl)
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2))
    found, want = pipe(x), models.compose(stages, None, None, x)
    assert found["key"].dtype == x["key"].dtype
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(want["key"])).all()
    if impl == "rbg":
        return

    def size(run):
        return jax.grad(lambda row: jnp.sum(run({**x, "row": row})["row"] ** 2))(x["row"])

    plain = size(lambda x: models.compose(stages, None, None, x))
    assert models.distance(size(pipe), plain) < 1e-5
