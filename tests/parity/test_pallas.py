"""Stages that call Pallas kernels, interpreted: parity with the plain model.

Letters: K stages, M microbatches, b = sequences, t = positions, d = width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collectives import local, varying_axes
from pipeline import Pipeline
from tests.models.layers import test_tensor_axis
from tests.support import models, tensor_stages
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.group import mesh as group_mesh
from tests.support.models import WIDTH

M, K, T, HEADS = 2, 2, 128, 2
REMATS = ("stage", None)


def kernel(body: Any, *arrays: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    return pl.pallas_call(body, out_shape=like, interpret=True)(*arrays)


def _square(x, out):
    out[...] = x[...] ** 2


def _slope(x, c, out):
    out[...] = 2 * x[...] * c[...]


@jax.custom_vjp
def square(x: jax.Array) -> jax.Array:
    """By a kernel, forward and backward."""
    return kernel(_square, x)


square.defvjp(lambda x: (square(x), x), lambda x, c: (kernel(_slope, x, c),))


class Own(nnx.Module):
    """A residual layer around a kernel of one's own."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        return x + 0.5 * square(jnp.tanh(x @ self.w[...]))


class Flash(nnx.Module):
    """Causal attention by `jax.experimental.pallas.ops.tpu.flash_attention`: [b, t, d]."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv = models.normal(rngs, WIDTH, 3 * WIDTH)
        self.out = models.normal(rngs, WIDTH, WIDTH)

    def attend(self, q, k, v):
        return flash_attention.flash_attention(q, k, v, causal=True)

    def __call__(self, x):
        y = (x @ self.qkv[...]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(y, (2, 3), (0, 2))
        y = self.attend(q * q.shape[-1] ** -0.5, k, v)
        return x + jnp.moveaxis(y, 1, 2).reshape(x.shape) @ self.out[...]


class Splash(Flash):
    """Attention by `jax.experimental.pallas.ops.tpu.splash_attention`."""

    def attend(self, q, k, v):
        causal = splash_attention_mask.CausalMask((T, T))
        names = ("q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        backward = {f"block_{name}": T for name in names}
        made = splash_attention_kernel.make_splash_mha_single_device(
            splash_attention_mask.MultiHeadMask([causal] * HEADS),
            block_sizes=splash_attention_kernel.BlockSizes(T, T, T, **backward),
            interpret=True,
        )
        return jax.vmap(made)(q, k, v)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """`flash_attention` has no switch of its own."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: call(*a, **{**k, "interpret": True}))


def mean(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def batch(kind: type) -> tuple[jax.Array, jax.Array]:
    shape = (2 * M, WIDTH) if kind is Own else (M, T, WIDTH)
    x, t = (jax.random.normal(jax.random.key(seed), shape) for seed in (1, 2))
    return x, t


@functools.cache
def wanted(kind: type) -> Any:
    return models.reference(models.build(kind, K), *batch(kind), mean)


FAST = {(Own, "1f1b", None), (Splash, "zb_h1", None)}
GRID = [
    (kind, family, remat)
    for kind in (Own, Flash, Splash)
    for family in ("gpipe", "1f1b", "zb_h1")
    for remat in REMATS
]
# Every two values meet.
SLOW = covering(GRID, FAST)


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "family", "remat"),
    [pytest.param(*c, marks=effort(c, FAST, SLOW)) for c in GRID],
)
def test_a_kernel_in_a_stage(kind, family, remat):
    mesh = Mesh(np.array(jax.devices()[:K]), ("stage",), axis_types=(AxisType.Auto,))
    stages = models.build(kind, K)
    pipe = Pipeline(stages, M, schedule=family, mesh=mesh, loss_fn=mean, remat=remat)
    models.assert_matches(pipe, pipe.value_and_grad(*batch(kind)), wanted(kind))


# --- beside an axis over which values vary: `collectives.local` ---


class Beside(tensor_stages.Parallel):
    """An MLP over ``tensor`` around a kernel, which also takes a scale that all ranks share."""

    def __call__(self, x):
        h = jnp.tanh(self.norm(x) @ self.up[...] + self.bias[...])
        h = local(lambda h, scale: h + square(h) * scale[0, 0])(h, 1 + self.scale[...])
        return x + tensor_stages.total(h @ self.down[...])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("remat", REMATS)
def test_a_kernel_beside_a_tensor_axis(family, remat):
    pipe = test_tensor_axis.pipeline(Beside, family=family, remat=remat)
    test_tensor_axis.check(pipe, Beside)


@pytest.mark.slow
@pytest.mark.derivatives
def test_gradients_of_what_all_ranks_share_are_summed():
    """Integers have none; what `vmap` makes of it is the same."""
    x, scale = models.rows(4), jnp.arange(1.0, 1.0 + WIDTH)
    picks = jnp.array([2, 0, 1])

    def f(x, scale, picks):
        return {"y": square(x)[picks] * scale[None]}

    def body(f, x, scale):
        def loss(x, scale):
            found = jax.vmap(f, in_axes=(0, None, None))(x[None], scale, picks)["y"]
            return jnp.sum(jnp.sin(found))

        value, grads = jax.value_and_grad(loss, (0, 1))(x, scale)
        return (jax.lax.psum(value, "tensor") if varying_axes(value) else value), grads

    def run(ranks):
        spec = P(None, "tensor")  # of x; each rank has some of the scales too
        cut = P("tensor")
        mapped = jax.shard_map(
            functools.partial(body, local(f)),
            mesh=group_mesh(ranks),
            in_specs=(spec, cut),
            out_specs=(P(), (spec, cut)),
        )
        return jax.jit(mapped)(x, scale)

    plain = body(f, x, scale)
    assert_close(run(2), plain)
    assert local(f)(x, scale, picks)["y"].shape == (3, WIDTH)


@pytest.mark.derivatives
def test_results_and_residuals_say_over_what_they_vary():
    def body(x, w):
        y, pullback = jax.vjp(local(lambda x, w: square(x) * w), x, w)
        assert varying_axes(y) == {"tensor"}
        assert all(varying_axes(leaf) == {"tensor"} for leaf in jax.tree.leaves(pullback))
        return pullback(y)

    spec, w = P(None, "tensor"), jnp.ones((1, 1))
    run = jax.shard_map(body, mesh=group_mesh(2), in_specs=(spec, P()), out_specs=(spec, P()))
    x = models.rows(4)
    dx, dw = jax.jit(run)(x, w)
    assert_close(dx, 2 * x**3)
    assert_close(dw, jnp.sum(x**4)[None, None])
