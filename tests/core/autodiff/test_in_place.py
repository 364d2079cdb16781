"""Gradients that a loop adds up: added in place, or held whole beside their sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from collectives.compat import REFS_ARE_WHOLE
from pipeline.core.autodiff.in_place import added_in_place, is_formed_in_a_loop

W, X = jnp.ones((3, 4, 4)), jnp.ones((2, 4))


def layers(w, x):
    return jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), None), x, w)[0]


def same_layer(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, x: x @ w[0], x)


def written(w, x):
    return x @ w[0] @ w[1]


@pytest.mark.parametrize(
    "f",
    [
        layers,
        same_layer,
        jax.jit(layers),
        jax.checkpoint(layers),
        lambda w, x: layers(w + 1, x) + written(w, x),
        lambda w, x: jax.lax.cond(x[0, 0] > 0, written, layers, w, x),
        lambda w, x: jax.lax.map(lambda row: row @ w[0], x),
    ],
)
def test_a_loop_forms_it(f):
    jaxpr = jax.make_jaxpr(f)(W, X).jaxpr
    assert is_formed_in_a_loop(jaxpr, jaxpr.invars[0])


@pytest.mark.parametrize(
    "f",
    [
        written,
        jax.jit(written),
        jax.checkpoint(written),
        lambda w, x: written(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
        lambda w, x: jax.lax.cond(x[0, 0] > 0, written, lambda w, x: x @ w[1], w, x),
        lambda w, x: layers(jnp.stack([x.T @ x] * 2), x @ w[2]),
    ],
)
def test_no_loop_does(f):
    jaxpr = jax.make_jaxpr(f)(W, X).jaxpr
    assert not is_formed_in_a_loop(jaxpr, jaxpr.invars[0])


@pytest.mark.skipif(REFS_ARE_WHOLE, reason="later releases of jax add such gradients in place")
@pytest.mark.parametrize(
    ("factor", "in_place"), [(lambda v, x: v * x, True), (lambda v, x: jnp.tanh(v) * x, False)]
)
def test_a_constant_step_of_an_inner_loop_forbids_it(factor, in_place):
    """jax 0.10 moves the step out of both loops, and mixes up the gradients of all constants."""

    def nested(w, v, x):
        def outer(_, x):
            return jax.lax.fori_loop(0, 2, lambda _, x: factor(v, x), x @ w)

        return jax.lax.fori_loop(0, 3, outer, x)

    jaxpr = jax.make_jaxpr(nested)(W[0], X, X).jaxpr
    assert (jaxpr.invars[0] in added_in_place(jaxpr, jaxpr.invars[:1])) == in_place
