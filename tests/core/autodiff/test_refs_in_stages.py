"""Mutable buffers (`jax.new_ref`) in stages, embed, head and loss (issue 38).

A write to a ref returns nothing, so it was left out wherever equations are chosen by what they
return: the loss was right, and gradients were up to 282% off. The oracle is the same formula
without a ref: JAX's own derivatives of refs that a loop makes in its body are wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, split
from tests.support import models
from tests.support.close import assert_close

WIDTH, ROWS, M = 4, 8, 4
X, T = jax.random.normal(jax.random.key(9), (2, ROWS, WIDTH))


def stored(x, w):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x @ w
    ref[...] = ref[...] + jnp.tanh(x)
    return jnp.tanh(ref[...])


def across_a_loop(x, w):
    ref = jax.new_ref(jnp.zeros_like(x))

    def body(c, _):
        ref[...] = ref[...] + jnp.sin(c @ w)
        return 0.9 * c, None

    return jax.lax.scan(body, x, None, length=3)[0] + ref[...]


def made_in_a_loop(x, w):
    def body(c, _):
        ref = jax.new_ref(jnp.zeros_like(c))
        ref[...] = jnp.tanh(c @ w)
        return ref[...], None

    return jax.lax.scan(body, x, None, length=3)[0]


def handed_to_a_jit(x, w):
    @jax.jit
    def advance(ref):
        ref[...] = jnp.sin(ref[...] @ w)

    ref = jax.new_ref(x)
    advance(ref)
    advance(ref)
    return ref[...]


def in_branches(x, w):
    ref = jax.new_ref(x)

    def one():
        ref[...] = x @ w

    def other():
        ref[...] = x - jnp.sin(x @ w)

    jax.lax.cond(x.sum() > 0, one, other)
    return jnp.sin(ref[...])


def rows_frozen(x, w):
    ref = jax.new_ref(x @ w)
    ref[0] = jnp.sin(x[1])
    return jax.nn.relu(jax.freeze(ref)) + x


def plain(kind, x, w):
    """The formula of a kind, without a ref."""
    if kind is stored:
        return jnp.tanh(x @ w + jnp.tanh(x))
    if kind is across_a_loop:
        return 0.9**3 * x + sum(jnp.sin(0.9**n * x @ w) for n in range(3))
    if kind is made_in_a_loop:
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
    if kind is handed_to_a_jit:
        return jnp.sin(jnp.sin(x @ w) @ w)
    if kind is in_branches:
        return jnp.sin(jnp.where(x.sum() > 0, x @ w, x - jnp.sin(x @ w)))
    return jax.nn.relu((x @ w).at[0].set(jnp.sin(x[1]))) + x


KINDS = [stored, across_a_loop, made_in_a_loop, handed_to_a_jit, in_branches, rows_frozen]


class Stage(nnx.Module):
    def __init__(self, kind, k, *, plain=False):
        self.w = nnx.Param(0.6 * jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)))
        self.kind, self.plain = kind, plain

    def __call__(self, x):
        w = self.w[...]
        return plain(self.kind, x, w) if self.plain else self.kind(x, w)


def loss_with_a_ref(y, t):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = models.squares(y, t)
    return ref[...]


def parity(make, K, S, loss_fn=models.squares, *, ends=False, **options):
    """Loss and gradients of stages with refs against those of the formulas."""
    parts = {"embed": make(10), "head": make(11)} if ends else {}
    pipe = Pipeline(
        [make(k) for k in range(K)], M, mesh=make_mesh(stage=S), loss_fn=loss_fn, **parts, **options
    )
    found = pipe.value_and_grad(X, T)
    bare = [make(k, plain=True) for k in range(K)]
    bare_ends = [make(n, plain=True) for n in (10, 11)] if ends else [None, None]

    @nnx.jit
    @nnx.value_and_grad
    def wanted(models_):
        (embed, *stages, head), total = models_, 0.0
        for x, t in zip(X.reshape(M, -1, WIDTH), T.reshape(M, -1, WIDTH), strict=True):
            y = x
            for part in (embed, *stages, head):
                y = y if part is None else part(y)
            total += models.squares(y, t) / M
        return total

    loss, grads = wanted(nnx.List([bare_ends[0], *bare, bare_ends[1]]))
    assert_close(found[0], loss)
    layers = pipe.to_layers(found[1])
    for k in range(K):
        assert_close(layers["stages"][k]["w"][...], grads[k + 1]["w"][...])
    if ends:
        assert_close(layers["embed"]["w"][...], grads[0]["w"][...])
        assert_close(layers["head"]["w"][...], grads[K + 1]["w"][...])


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("remat", ["stage", None])
def test_gradients_are_those_of_the_formula(kind, remat):
    parity(lambda k, **more: Stage(kind, k, **more), 2, 2, schedule="zb_h1", remat=remat)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "remat": None},
        {"schedule": "zb_v", "K": 4},
        {"schedule": "interleaved_1f1b", "K": 4, "remat": None},
        {"schedule": "1f1b", "remat": jax.checkpoint_policies.dots_saveable},
        {"schedule": "1f1b", "remat": None, "S": 1},
        {"schedule": "zb_h1"},
    ],
    ids=str,
)
def test_of_every_schedule_and_mode(kind, options):
    options = dict(options)
    sizes = options.pop("K", 2), options.pop("S", 2)
    parity(lambda k, **more: Stage(kind, k, **more), *sizes, **options)


@pytest.mark.few
@pytest.mark.parametrize("remat", ["stage", None])
def test_embed_head_and_loss_may_make_refs(remat):
    def make(k, **more):
        return Stage(stored if k < 10 else made_in_a_loop, k, **more)

    parity(make, 2, 2, loss_with_a_ref, ends=True, schedule="zb_h1", remat=remat)


def test_a_ref_in_one_of_unlike_stages():
    def make(k, **more):
        return Stage((stored, rows_frozen)[k], k, **more)

    parity(make, 2, 2, schedule="zb_h1", remat=None)


class Whole(nnx.Module):
    """A model whose ref lives across all of its blocks."""

    def __init__(self, *, plain=False):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(4)])
        self.plain = plain

    def __call__(self, x):
        if self.plain:
            for block in self.blocks:
                x = jnp.tanh(block(x)) + x
            return x
        ref = jax.new_ref(x)
        for block in self.blocks:
            ref[...] = jnp.tanh(block(ref[...])) + ref[...]
        return ref[...]


@pytest.mark.few
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_model_cut_within_the_life_of_a_ref(num_stages):
    parts = split(Whole(), num_stages, X)
    mesh = make_mesh(stage=2)
    pipe = Pipeline(**parts, num_microbatches=M, mesh=mesh, loss_fn=models.squares, schedule="1f1b")
    loss, grads = pipe.value_and_grad(X, T)
    bare = Whole(plain=True)
    want, wanted = nnx.value_and_grad(lambda m: models.squares(m(X), T))(bare)
    assert_close(loss, want)
    found = parts.from_layers(pipe.to_layers(grads))
    assert_close(dict(nnx.to_flat_state(found)), dict(nnx.to_flat_state(wanted)))
