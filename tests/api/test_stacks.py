"""One module for all stages: a stack is taken, a model that looks like one is refused (issue 38).

Letters: K stages, M microbatches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.stacks import REMEDY
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("lenient")
WIDTH, M = 8, 2
X, T = jax.random.normal(jax.random.key(0), (2, 8, WIDTH))


def mse(y, t):
    return ((y - t) ** 2).mean()


def make(stages, K=4):
    return Pipeline(stages, M, mesh=make_mesh(stage=K), loss_fn=mse)


def linears(sizes):
    return [nnx.Linear(a, b, rngs=nnx.Rngs(k)) for k, (a, b) in enumerate(sizes)]


class Model(nnx.Module):
    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Table(nnx.Module):
    """A layer of the user's own, in front of one of flax's."""

    def __init__(self):
        self.table = nnx.Param(jnp.ones((WIDTH, WIDTH)))
        self.norm = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x @ self.table[...])


PLAIN = {
    "Sequential": (
        lambda: nnx.Sequential(*linears([(8, 8)] * 4)),
        "layers.0.kernel is float32[8,8]",
    ),
    "Model": (lambda: Model(*linears([(8, 8)] * 3)), "layers.0.kernel is float32[8,8]"),
    "Table": (Table, "norm.scale is float32[8]"),
    "Conv": (
        lambda: nnx.Conv(8, 8, kernel_size=(8,), use_bias=False, rngs=nnx.Rngs(0)),
        "kernel is float32[8,8,8]",
    ),
    "Embed": (lambda: nnx.Embed(8, 8, rngs=nnx.Rngs(0)), "embedding is float32[8,8]"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_layers_of_flax_show_that_a_module_is_no_stack(name):
    model, said = PLAIN[name]
    with pytest.raises(ValueError, match="stages is one") as caught:
        make(model())
    assert str(caught.value) == (
        f"stages is one {name}, whose {said}, without an axis for stages: {REMEDY}"
    )
    assert "a list of modules" in REMEDY
    assert "pipeline.split(model, K, inputs)" in REMEDY


class Scale(nnx.Module):
    """Arrays of its own alone, of which nobody knows how many axes they have."""

    def __init__(self, size=WIDTH):
        self.scale = nnx.Param(jnp.linspace(0.5, 1, size))
        self.shift = nnx.Param(jnp.linspace(0, 1, size))

    def __call__(self, x):
        return jnp.tanh(x) * self.scale[...] + self.shift[...]


class Turned(Scale):
    """As one model it mixes columns."""

    def __call__(self, x):
        return jnp.roll(x, 1, axis=-1) * self.scale[...] - self.shift[...]


@pytest.mark.parametrize("kind", [Scale, Turned])
@pytest.mark.parametrize("method", ["loss", "value_and_grad", "outputs"])
def test_a_module_that_works_as_one_stage_is_no_stack(kind, method):
    pipe = make(kind())
    call = {
        "loss": lambda: pipe.loss(X, T),
        "value_and_grad": lambda: pipe.value_and_grad(X, T),
        "outputs": lambda: pipe(X),
    }
    with pytest.raises(ValueError, match="stages is one module") as caught:
        call[method]()
    assert str(caught.value) == (
        f"stages is one module whose arrays all have a leading axis of 8; it is taken for 8 "
        f"stages, and computes the same shapes as one stage: {REMEDY}"
    )


class Matrix(nnx.Module):
    """One array of the user's own, of which a row is no stage."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return jax.lax.dot_general(x, self.w[...], (((1,), (0,)), ((), ())))


def test_a_module_whose_rows_are_no_stages():
    with pytest.raises(ValueError, match="cannot run on") as caught:
        make(Matrix()).loss(X, T)
    message = str(caught.value)
    assert message.startswith("stages[1] cannot run on float32[4] (dot_general")
    assert message.endswith(
        f"; stages is one module whose arrays all have a leading axis of 8: {REMEDY}"
    )


class Product(nnx.Module):
    def __init__(self, k):
        self.w = nnx.Param(jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)) / 3)

    def __call__(self, x):
        return x @ self.w[...]


class Noisy(nnx.Module):
    def __init__(self, k):
        rngs = nnx.Rngs(k)
        self.drop, self.scale = nnx.Dropout(0.0, rngs=rngs), nnx.Param(jnp.full(WIDTH, 1.0 + k))

    def __call__(self, x):
        return self.drop(x) * self.scale[...]


KINDS = [lambda k: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)), Product, Noisy, lambda _: Scale()]


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_one(kind):
    K = 4
    modules = [kind(k) for k in range(K)]
    graphdef, states = nnx.split(modules[0])[0], [nnx.state(m) for m in modules]
    stack = nnx.merge(graphdef, jax.tree.map(lambda *x: jnp.stack(x), *states))
    pipe, wanted = make(stack), X
    for module in modules:
        wanted = module(wanted)
    assert len(pipe.stages()) == K
    assert_close(pipe(X), wanted)
    assert_close(pipe.loss(X, T), mse(wanted, T))
