"""Variables of a stage beside `nnx.Param`, and forbidden uses of them."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import WIDTH, Block, Noisy, Readout, normal

X, T = models.rows(8), models.rows(8, seed=3)


def make(stages, M=4, *, D=1, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    return Pipeline(stages, M, mesh=make_mesh(stage=2, data=D), **options)


def assert_parity(stages, *, head=None, **options) -> Pipeline:
    pipe = make(stages, head=head, **options)
    want = models.reference(stages, X, T, models.squares, head=head)
    models.assert_matches(pipe, pipe.value_and_grad(X, T), want)
    assert_close(pipe(X), models.compose(stages, None, head, X))
    return pipe


# --- random streams ---


@pytest.mark.few
@pytest.mark.parametrize("ranks", [4, 2])
def test_forked_streams_are_those_of_the_plain_stages(ranks):
    """Issue 38: nnx.fork_rngs of a pipeline failed in JAX's words about arrays of keys."""
    stages, plain = models.build(Noisy, 4), models.build(Noisy, 4)
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=ranks), loss_fn=models.squares)
    before = pipe.replace(num_microbatches=2).loss(X, T)
    backup = nnx.fork_rngs(pipe)
    nnx.fork_rngs(plain)
    for own, wanted in zip(pipe.stages(), plain, strict=True):
        assert nnx.graphdef(own) == nnx.graphdef(wanted)
        keys = [
            [jax.random.key_data(leaf) for leaf in jax.tree.leaves(nnx.state(one, nnx.RngKey))]
            for one in (own, wanted)
        ]
        np.testing.assert_array_equal(*keys)
    forked = pipe.loss(X, T)
    assert float(before) != float(forked)
    nnx.restore_rngs(backup)
    with pytest.raises(ValueError, match="have a key for each stage: call nnx"):
        nnx.fork_rngs(pipe, split=3)


@pytest.mark.slow
def test_streams_of_stages_that_are_not_alike_cannot_be_forked():
    """Issue 38: what cannot be reached is refused, with what to do instead."""
    pipe = make([Noisy(nnx.Rngs(0)), nnx.Sequential(Noisy(nnx.Rngs(1)), Block(nnx.Rngs(2)))])
    with pytest.raises(ValueError, match="fork those of the stages before Pipeline"):
        nnx.fork_rngs(pipe)
    pipe.value_and_grad(X, T)


def counts(pipe: Pipeline) -> list[list[int]]:
    return [leaf.tolist() for leaf in jax.tree.leaves(nnx.state(pipe, nnx.RngCount))]


@pytest.mark.slow
def test_a_call_that_fails_does_not_count():
    """A repaired call draws the numbers of the call that failed; it drew new ones."""
    pipe, other = (make(models.build(Noisy, 2), memory_limit=limit) for limit in (1, None))
    before = counts(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="memory_limit"):
            pipe.value_and_grad(X, T)
    for step in (other.loss, other.value_and_grad):
        with pytest.raises(TypeError, match="incompatible shapes"):
            step(X, T[:, :5])
    with pytest.raises((TypeError, ValueError), match=r"\(2, 5\)|\[2,5\]"):
        other(X[:, :5])
    assert counts(pipe) == counts(other) == before
    again = pipe.value_and_grad(X, T)  # the warning comes once
    np.testing.assert_array_equal(again[0], other.value_and_grad(X, T)[0])
    assert counts(pipe) == counts(other) != before


# --- arrays that are no variables ---


class Plain(nnx.Module):
    """Holds arrays as they are: of JAX, of NumPy, in a list, and a key."""

    def __init__(self, rngs: nnx.Rngs, *, layers: int = 1, length: int = WIDTH):
        self.speed = jnp.arange(length, dtype=jnp.float32)[None]
        self.flags = np.array([True, False])
        self.scales = nnx.List([jnp.full((1, 1), 0.5)])
        self.key = jax.random.key(7)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.w = normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        noise = jax.random.normal(self.key, (1, WIDTH))
        x = jnp.where(self.flags[0], x * self.scales[0], 0.0) + noise
        return x + jnp.tanh(x @ self.w[...]) * self.speed[:, :WIDTH]


@pytest.mark.few
@pytest.mark.parametrize(
    "data_parallel", ["replicated", pytest.param("zero1", marks=pytest.mark.slow), "fsdp"]
)
def test_plain_arrays(data_parallel):
    stages = models.build(Plain, 2)
    pipe = assert_parity(stages, M=2, D=2, data_parallel=data_parallel, head=Plain(nnx.Rngs(5)))
    found = pipe.stages()[0].speed
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, stages[0].speed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"remat": None, "schedule": "zb_h1"}],
)
def test_plain_arrays_of_stages_that_are_not_alike(options):
    stages = [Plain(nnx.Rngs(0)), Plain(nnx.Rngs(1), layers=2, length=3 * WIDTH)]
    pipe = assert_parity(stages, **options)
    assert "stages[1] differs from stages[0] at" in pipe.describe()
    for found, given in zip(pipe.stages(), stages, strict=True):
        assert isinstance(found.speed, jax.Array)
        np.testing.assert_array_equal(found.speed, given.speed)
        assert_close(found(X), given(X), tolerance=1e-6)


class Bag(nnx.Module):
    """A weight that is a dict of arrays, and one that is nothing."""

    def __init__(self, rngs: nnx.Rngs):
        arrays = {"w": normal(rngs, WIDTH, WIDTH)[...], "b": normal(rngs, 1, WIDTH)[...]}
        self.bag, self.nothing = nnx.Param(arrays), nnx.Param(None)

    def __call__(self, x):
        return jnp.tanh(x @ self.bag["w"] + self.bag["b"])


def test_weights_that_are_trees():
    assert_parity(models.build(Bag, 2), head=Bag(nnx.Rngs(9)))


def test_weights_that_are_trees_in_stages_that_are_not_alike():
    with pytest.raises(ValueError) as caught:
        make([*models.build(Block, 1), *models.build(Bag, 1)])
    assert str(caught.value) == (
        "bag is a Param of dict, but stages[1] differs from stages[0] at bag: Param float32[1,8] "
        "float32[8,8] against no such leaf: stages that are not alike share their storage array "
        "by array; give each array a variable of its own, or make the stages of a chunk alike"
    )


# --- state that does not last ---


class Sowing(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "norm", jnp.sum(x * x))
        return x


class Remembering(nnx.Module):
    def __init__(self):
        self.last = nnx.data(None)

    def __call__(self, x):
        self.last = x
        return x


class Counting(nnx.Module):
    def __init__(self):
        self.calls = jnp.zeros(())

    def __call__(self, x):
        self.calls = self.calls + 1.0
        return x


NOT_KEPT = "a pipeline runs a stage many times per step and keeps no such state"


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Sowing,
            (
                f"a stage makes the Intermediate norm when it is called: {NOT_KEPT}; let it return "
                f"what is needed as a part of its activation, or leave it out"
            ),
        ),
        (
            Remembering,
            (
                f"a stage makes the array last when it is called: {NOT_KEPT}; let it return what "
                f"is needed as a part of its activation, or leave it out"
            ),
        ),
        (
            Counting,
            (
                f"a stage writes to its array calls: {NOT_KEPT}; declare it, as by "
                f"Pipeline(..., state=nnx.BatchStat), use a stateless layer (LayerNorm for "
                f"BatchNorm), or freeze it"
            ),
        ),
    ],
)
def test_state_that_would_be_lost(kind, message):
    for call in (make([kind(), kind()]), lambda x: make([kind(), kind()]).value_and_grad(x, x)):
        with pytest.raises(ValueError) as caught:
            call(X)
        assert str(caught.value) == message


# --- variables that stages share ---


UNTIED = (
    "each would have a value, a gradient and an update of its own, on its own rank; give every "
    "stage weights of its own (nnx.clone), or tie embed= and head=, which may share"
)


def test_weights_that_stages_share():
    one, two = models.build(Block, 2)
    two.up = one.up
    with pytest.raises(ValueError) as caught:
        make([one, two])
    assert str(caught.value) == f"stages[1].up is the same Param as stages[0].up: {UNTIED}"
    with pytest.raises(ValueError) as caught:
        make([*models.build(Block, 2)[:1], one], head=one)
    assert str(caught.value) == f"head.down is the same Param as stages[1].down: {UNTIED}"


def test_constants_that_stages_share():
    constant = nnx.Variable(jnp.full((1, WIDTH), 0.5))

    class Scaled(Block):
        def __call__(self, x):
            return super().__call__(x) * self.constant[...]

    stages = models.build(Scaled, 2)
    for stage in stages:
        stage.constant = constant
    assert_parity(stages)


class Drawing(nnx.Module):
    """Adds flags drawn from a stream that it does not own."""

    def __init__(self, rngs: nnx.Rngs, w: nnx.Param | None = None):
        self.rngs, self.w = rngs, w or normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        return x + jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape).astype(x.dtype)


@pytest.mark.few
@pytest.mark.parametrize("uneven", [False, True])
def test_a_random_stream_that_stages_share(uneven):
    """In turns, each would draw flags of its own; so it does in a pipeline, head and all."""
    rngs = nnx.Rngs(0, dropout=1)
    stages = [Drawing(rngs) for _ in range(4)]
    if uneven:
        stages[1].more = normal(rngs, 3)
    before = int(rngs.dropout.count[...])
    pipe = make(stages, M=1, head=Drawing(rngs))
    found = np.asarray(pipe(jnp.zeros((1, 64, WIDTH))))
    assert set(np.unique(found)) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert abs(found.mean() - 2.5) < 0.2  # five coins: 2.5, standard error 0.05
    assert abs(found.var() - 1.25) < 0.3
    assert int(rngs.dropout.count[...]) == before, "the modules given are not modified"


def test_ends_that_share_a_stream_with_stages_stay_tied():
    rngs = nnx.Rngs(0)
    embed = Drawing(rngs)
    head = Drawing(rngs, embed.w)
    pipe = make([Drawing(rngs), Drawing(rngs)], embed=embed, head=head)
    assert pipe.embed.w is pipe.head.w
    assert pipe.embed.w is not embed.w


# --- random streams that are not one key ---


class Deep(nnx.Module):
    """Layers of one stacked module, each with a stream of its own, run by a scan."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make_layers(rngs):
            return Noisy(rngs)

        self.layers = make_layers(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", pytest.param(None, marks=pytest.mark.slow)])
def test_layers_with_a_stream_each(remat):
    pipe = make(models.build(Deep, 2), remat=remat)
    losses = [float(pipe.value_and_grad(X, T)[0]) for _ in range(2)]
    assert losses[0] != losses[1]
    pipe.eval()
    stages = models.build(Deep, 2)
    for stage in stages:
        stage.eval()
    models.assert_matches(
        pipe, pipe.value_and_grad(X, T), models.reference(stages, X, T, models.squares)
    )


class Keyed(nnx.Module):
    """Noise of a key that nobody counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, WIDTH)
        self.key = nnx.RngKey(jax.random.key(3), tag="noise")

    def __call__(self, x):
        return x @ self.w[...] + jax.random.normal(self.key[...], (1, WIDTH))


def test_a_key_without_a_count_is_a_constant():
    assert_parity(models.build(Keyed, 2))


# --- outputs ---


def test_flags_as_outputs():
    stages, w = models.build(Block, 2), Readout(nnx.Rngs(4)).w[...]
    for end in (lambda x: x > 0.0, lambda x: {"flag": x @ w > 0.0, "row": x}):
        found = make(stages, head=end)(X)
        want = models.compose(stages, None, end, X)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            assert x.dtype == y.dtype
            assert_close(x, y)
