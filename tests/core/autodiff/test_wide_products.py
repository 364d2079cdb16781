"""On GPUs products of gradients are made in the dtype of their sums, and added as they are made.

Issue 42.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.autodiff import accumulate
from pipeline.core.autodiff.accumulate import differentiate
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from pipeline.core.autodiff.wide_products import widened
from tests.core.autodiff.test_cast_once import HIDDEN, KINDS, WIDTH, body_of, loss_fn
from tests.support.close import assert_close, distance

HALF = jnp.dtype(jnp.bfloat16)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as for a GPU."""
    monkeypatch.setattr(accumulate, "is_gpu", lambda: True)


def products(jaxpr: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of all products of a jaxpr, at any depth."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (made,) = eqn.outvars
            assert eqn.params["preferred_element_type"] in (None, made.aval.dtype)
            found.append((made.aval.shape, str(made.aval.dtype)))
        for body in jaxprs_of(eqn):
            found += products(body)
    return found


def pipeline(kind: str, **options: Any) -> Pipeline:
    stages = [KINDS[kind](nnx.Rngs(k)) for k in range(4)]
    mesh = make_mesh(devices=jax.devices()[:2], stage=2)
    return Pipeline(stages, 4, mesh=mesh, loss_fn=loss_fn, **options)


def of_weights(pipe: Pipeline) -> set[str]:
    """The dtypes in which a step makes gradients of the two matrices of a block."""
    shapes = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    return {dtype for shape, dtype in products(body_of(pipe)) if shape in shapes}


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["zb_v", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("remat", [None, "stage"])
@pytest.mark.usefixtures("on_gpu")
def test_gradients_of_weights_are_made_in_float32(schedule: str, remat: Any) -> None:
    assert of_weights(pipeline("block", schedule=schedule, remat=remat)) == {"float32"}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["scan", "checkpoint"])
@pytest.mark.usefixtures("on_gpu")
def test_products_of_a_scan_over_layers_are_left(kind: str) -> None:
    """They are added to a part of a sum, in a kernel of its own."""
    assert of_weights(pipeline(kind, schedule="zb_v")) == {"bfloat16"}


def test_other_platforms_round_as_the_model_says() -> None:
    assert of_weights(pipeline("block", schedule="zb_v", remat=None)) == {"bfloat16"}


def back(f: Any, weights: list[jax.Array], x: jax.Array, *, late: bool = False) -> list[jax.Array]:
    """The sums of gradients after one backward, and x's."""
    refs = [jax.new_ref(jnp.ones(w.shape, jnp.float32)) for w in weights]
    y, _, pullback = differentiate(lambda w, x: (f(w, *x), ()), weights, [x], late=late)
    dx = pullback(jnp.ones_like(y), refs, want_x=True)
    return [*(ref[...] for ref in refs), *dx]


def example() -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[:2]]
    return weights, jax.random.normal(keys[2], (256, WIDTH)).astype(HALF)


def two_layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    up, down = (w.astype(HALF) for w in weights)
    return jnp.sin(x @ up) @ down.T


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.usefixtures("on_gpu")
def test_a_sum_has_no_rounding_of_its_product(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = example()
    found = back(two_layers, weights, x, late=late)
    monkeypatch.setattr(accumulate, "is_gpu", lambda: False)
    rounded = back(two_layers, weights, x, late=late)
    h = jnp.sin(x @ weights[0].astype(HALF)).astype(jnp.float32)
    exact = 1 + jnp.ones((WIDTH, len(x))) @ h
    assert_close(found[1], exact, tolerance=1e-6)
    assert distance(rounded[1], exact) > 1e-5
    assert_close(found[2], rounded[2], tolerance=0.0)  # x's gradient is as it was


def remade(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jax.checkpoint(two_layers)(weights, x)


def called(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jax.jit(two_layers)(weights, x)


def chosen(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, two_layers, lambda w, x: two_layers(w, -x), weights, x)


@pytest.mark.parametrize("f", [two_layers, remade, called, chosen])
@pytest.mark.usefixtures("on_gpu")
def test_bodies_are_looked_into(f: Any) -> None:
    weights, x = example()
    made = products(jax.make_jaxpr(lambda *given: back(f, *given))(weights, x).jaxpr)
    branches = 2 if f is chosen else 1
    assert made.count(((WIDTH, WIDTH), "float32")) == 2 * branches
    assert ((WIDTH, WIDTH), "bfloat16") not in made


def shared(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Both layers read one weight, whose gradient is the sum of two products in bfloat16."""
    w = weights[0].astype(HALF)
    return jnp.sin(x @ w) @ w


def by_algorithm(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    up, down = (w.astype(HALF) for w in weights)
    return jnp.dot(jnp.sin(jnp.dot(x, up, precision=algorithm)), down, precision=algorithm)


def test_other_products_stay_as_they_are() -> None:
    weights, x = example()
    for f in (shared, by_algorithm):
        jaxpr = jax.make_jaxpr(lambda w, x, f=f: back(f, w, x))(weights, x).jaxpr
        assert widened(jaxpr, ()) is jaxpr


def test_a_result_that_nobody_sums_is_rounded() -> None:
    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        z, both = x @ y, x @ x
        return z.astype(jnp.float32), (y @ x).astype(jnp.float32), both.astype(jnp.float32), both

    x = jnp.ones((WIDTH, WIDTH), HALF)
    jaxpr = jax.make_jaxpr(f)(x, x).jaxpr
    kinds = [dtype for _, dtype in products(widened(jaxpr, (True, False, True)))]
    assert kinds == ["float32", "bfloat16", "bfloat16"]
