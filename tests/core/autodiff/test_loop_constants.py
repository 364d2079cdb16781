"""Constants of loops whose gradients are values beside those that are added to refs (issue 38).

jax 0.10 confuses them where a value comes before a ref; a program of the fuzzer had one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("lenient")
WIDTH, M = 4, 2
X, T = 0.5 * jax.random.normal(jax.random.key(9), (2, 8, WIDTH))


def fori(x, w, v):
    return jax.lax.fori_loop(0, 3, lambda _, b: jnp.einsum("bd,ed->be", x - b, w), x) * v


def square(x, w, v):
    """A mix-up of equal shapes would show in the numbers alone."""
    z = x[:WIDTH]
    return jax.lax.fori_loop(0, 2, lambda _, b: jnp.tanh(z @ w - b @ w), z).mean() + x * v


def rows(x, w, v):
    """Scanned over: values of the activation, then weights."""
    pairs = jnp.stack([x, 2 * x]), jnp.stack([w, w + v])
    return jax.lax.scan(lambda c, p: (jnp.tanh(c + p[0] @ p[1]), None), x, pairs)[0]


def two(x, w, v):
    """Two weights, one of which is read twice, so that its gradient is a value."""

    def body(_, b):
        return jnp.tanh(b * v + x) @ w + b @ w

    return jax.lax.fori_loop(0, 2, body, x)


PROGRAMS = [fori, square, rows, two]


class Stage(nnx.Module):
    def __init__(self, k, program):
        draw = jax.random.normal(jax.random.key(k), (WIDTH + 1, WIDTH))
        self.w, self.v = nnx.Param(0.4 * draw[:-1]), nnx.Param(draw[-1])
        self.program = program

    def __call__(self, x):
        y, _ = jax.jit(lambda x, w, v: (self.program(x, w, v), jnp.tanh(x)))(
            x, self.w[...], self.v[...]
        )
        return y + x @ jax.nn.softmax(self.w[...])


@pytest.mark.few
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("schedule", "remat"), [("zb_h1", None), ("1f1b", None), ("zb_h1", "stage")]
)
def test_gradients_are_those_of_the_plain_model(program, schedule, remat):
    def loss_fn(y, t):
        return ((y - t) ** 2).mean()

    def plain(stages):
        losses = []
        for x, t in zip(jnp.split(X, M), jnp.split(T, M), strict=True):
            for stage in stages:
                x = stage(x)  # noqa: PLW2901
            losses.append(loss_fn(x, t))
        return sum(losses) / M

    stages = nnx.List([Stage(k, program) for k in range(2)])
    loss, grads = nnx.value_and_grad(plain)(stages)
    options = {"schedule": schedule, "remat": remat, "mesh": make_mesh(stage=2)}
    pipe = Pipeline([Stage(k, program) for k in range(2)], M, loss_fn=loss_fn, **options)
    found, own = pipe.value_and_grad(X, T)
    assert_close(found, loss)
    layers = pipe.to_layers(nnx.as_pure(own))["stages"]
    assert_close(jax.tree.leaves(layers), jax.tree.leaves(nnx.as_pure(grads)))
