"""A pipeline under the transformations of JAX and NNX: what holds, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import WIDTH, Block, Noisy

X, T = models.rows(4), models.rows(4, seed=3)
BATCHES = jnp.stack([X, 2 * X])
TARGETS = jnp.stack([T, -T])


def make(stages=None, *, D=1, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    stages = models.build(Block, 2) if stages is None else stages
    return Pipeline(stages, 2, mesh=make_mesh(stage=2, data=D), **options)


# --- several batches in one gradient ---


def summed(pipe):
    """Gradients of the sum of the losses of all batches."""
    grads = [pipe.value_and_grad(x, t)[1] for x, t in zip(BATCHES, TARGETS, strict=True)]
    return jax.tree.map(jnp.add, *grads)


@pytest.mark.derivatives
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_gradient_of_a_scan_over_batches(checkpoint):
    pipe = make()
    graphdef, state = nnx.split(pipe)

    def total(state):
        def add(so_far, batch):
            return so_far + nnx.merge(graphdef, state).loss(*batch), None

        add = jax.checkpoint(add) if checkpoint else add
        return jax.lax.scan(add, jnp.zeros(()), (BATCHES, TARGETS))[0]

    assert_close(jax.jit(jax.grad(total))(state), summed(pipe))


def test_the_gradient_of_a_scan_that_feeds_outputs_back():
    graphdef, state = nnx.split(make())

    def last(state, *, scanned):
        def step(x, more):
            return nnx.merge(graphdef, state)(x + more), None

        if scanned:
            return jnp.sum(jax.lax.scan(step, X, BATCHES)[0] ** 2)
        x = X
        for more in BATCHES:
            x, _ = step(x, more)
        return jnp.sum(x**2)

    grads = [jax.jit(jax.grad(lambda s, b=b: last(s, scanned=b)))(state) for b in (True, False)]
    assert_close(*grads)


@pytest.mark.few
@pytest.mark.parametrize("loop", ["map", "fori_loop"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_gradient_of_other_loops(loop, schedule):
    """Issue 38: JAX spoke of refs on its 0.10."""
    pipe = make(schedule=schedule)
    graphdef, state = nnx.split(pipe)

    def one(state, x, t):
        return nnx.merge(graphdef, state).loss(x, t)

    def total(state):
        if loop == "map":
            return jax.lax.map(lambda batch: one(state, *batch), (BATCHES, TARGETS)).sum()

        def add(i, so_far):
            return so_far + one(state, BATCHES[i], TARGETS[i])

        return jax.lax.fori_loop(0, len(BATCHES), add, jnp.zeros(()))

    for grads in (jax.jit(jax.grad(total))(state), jax.grad(total)(state)):
        assert_close(grads, summed(pipe))


def test_a_scan_that_adds_gradients_up():
    pipe = make()
    graphdef, state = nnx.split(pipe)

    def add(so_far, batch):
        _, grads = nnx.merge(graphdef, state).value_and_grad(*batch)
        return jax.tree.map(jnp.add, so_far, grads), None

    start = jax.tree.map(jnp.zeros_like, nnx.state(pipe, nnx.Param))
    found = jax.jit(lambda: jax.lax.scan(add, start, (BATCHES, TARGETS))[0])()
    assert_close(found, summed(pipe))


# --- vmap, and forward mode over reverse mode ---


def test_vmap_over_batches():
    pipe = make()
    take = jax.vmap(jax.grad(lambda x: pipe.loss(x, T)))
    one = jax.grad(lambda x: pipe.loss(x, T))
    assert_close(take(BATCHES), jnp.stack([one(x) for x in BATCHES]))
    assert_close(jax.vmap(pipe)(BATCHES), jnp.stack([pipe(x) for x in BATCHES]))


@pytest.mark.derivatives
def test_a_product_with_the_hessian():
    pipe, direction = make(), models.rows(4, seed=8)

    def plain(x):
        return models.squares(models.compose(pipe.stages(), None, None, x), T)

    found, want = (
        jax.jvp(jax.grad(f), (X,), (direction,))[1] for f in (lambda x: pipe.loss(x, T), plain)
    )
    assert_close(found, want)


TWICE = (
    "a pipeline was differentiated twice by reverse mode, and its backward pass has no such "
    "derivative; for products with a Hessian take jax.jvp of jax.grad"
)
GRADIENTS = (
    "value_and_grad() was differentiated, and it returns gradients itself: differentiate loss(), "
    "or call value_and_grad() alone"
)


def twice(f):
    return lambda pipe: jax.grad(lambda x: jnp.sum(jax.grad(lambda y: f(pipe, y))(x)))(X)


@pytest.mark.few
@pytest.mark.parametrize(
    ("take", "message"),
    [
        (twice(lambda pipe, x: pipe.loss(x, T)), TWICE),
        (twice(lambda pipe, x: jnp.sum(pipe(x) ** 2)), TWICE),
        (nnx.grad(lambda pipe: pipe.value_and_grad(X, T)[0]), GRADIENTS),
        (lambda pipe: jax.grad(lambda x: pipe.value_and_grad(x, T)[0])(X), GRADIENTS),
    ],
    ids=["loss", "outputs", "value_and_grad", "value_and_grad for inputs"],
)
def test_what_has_no_derivative(take, message):
    with pytest.raises(ValueError) as caught:
        take(make())
    assert str(caught.value) == message


def test_forward_mode_is_refused_by_jax():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: make().loss(x, T), (X,), (X,))


# --- made under jit ---


class Several(nnx.Module):
    """Noisy layers."""

    def __init__(self, count: int):
        self.layers = nnx.List(models.build(Noisy, count))
        self.scale = nnx.Param(jnp.ones((count, 3)))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * jnp.mean(self.scale[...])


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (lambda: models.build(Noisy, 2), {}),
        (lambda: models.build(Block, 2), {"data_parallel": "fsdp", "D": 2}),
        (lambda: [Several(1), Several(3)], {}),
    ],
    ids=["alike", "fsdp", "not alike"],
)
def test_a_pipeline_made_under_jit(kind, options):
    """So that no device ever holds a model that is too large for it."""

    def create():
        return make(kind(), head=Block(nnx.Rngs(9)), **options)

    found, want = nnx.jit(create)(), create()
    for a, b in zip(*(jax.tree.leaves(nnx.state(p)) for p in (found, want)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    found.eval()
    want.eval()
    assert_close(found.value_and_grad(X, T), want.value_and_grad(X, T))


def test_a_pipeline_of_types_alone():
    pipe = nnx.eval_shape(lambda: make(head=Block(nnx.Rngs(9))))
    rows = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
    assert "bytes per rank, predicted" in pipe.describe(rows, rows)
    assert "func.func public @main" in pipe.lower(rows, rows).as_text()
