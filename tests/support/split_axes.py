"""Stages with collectives of their own over a row axis (`expert`) or a position axis (`context`).

Without these axes around them the same modules compute the same on all rows and positions.

Letters: b rows, T positions, W width, E experts, H hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh, shift_right

WIDTH, EXPERTS, HIDDEN, LENGTH, ROWS = 8, 4, 6, 8, 16
EXPERT, CONTEXT = "expert", "context"


def is_split(axis: str) -> bool:
    """Tell whether ranks along an axis run this, each on its part."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def weight(rngs: nnx.Rngs, *shape: int, axes=None) -> nnx.Param:
    """A weight, whose dims may be sharded over mesh axes."""
    names = {} if axes is None else {"out_sharding": axes, "eager_sharding": False}
    value = jax.random.normal(rngs.params(), shape) * 0.5 * shape[-2] ** -0.5
    return nnx.Param(value, **names)


class Experts(nnx.Module):
    """A dense layer, and experts that are gathered tokens' and shared out over `expert`."""

    def __init__(self, rngs: nnx.Rngs, *, dropout: float = 0.0):
        self.dense = weight(rngs, WIDTH, WIDTH)
        self.router = weight(rngs, WIDTH, EXPERTS)
        self.up = weight(rngs, EXPERTS, WIDTH, HIDDEN, axes=(EXPERT,))
        self.down = weight(rngs, EXPERTS, HIDDEN, WIDTH, axes=(EXPERT,))
        self.drop = nnx.Dropout(dropout, rngs=rngs.fork()) if dropout else None

    def __call__(self, x):
        x = x + jnp.tanh(x @ self.dense[...])
        if self.drop is not None:
            x = self.drop(x)
        tokens, up, down = x, self.up[...], self.down[...]
        first = 0
        if is_split(EXPERT):
            tokens = jax.lax.all_gather(x, EXPERT, axis=0, tiled=True)
            first = jax.lax.axis_index(EXPERT) * up.shape[0]
        gates = jax.nn.softmax(tokens @ self.router[...], axis=-1)
        own = jax.lax.dynamic_slice_in_dim(gates, first, up.shape[0], axis=-1)
        hidden = jnp.tanh(jnp.einsum("btw,ewh->bteh", tokens, up))
        y = jnp.einsum("bteh,ehw,bte->btw", hidden, down, own)
        if is_split(EXPERT):
            y = jax.lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True)
        return x + y


class Attention(nnx.Module):
    """Causal attention with one head, whose keys and values are gathered over `context`."""

    def __init__(self, rngs: nnx.Rngs, *, dropout: float = 0.0):
        self.q, self.k, self.v = (weight(rngs, WIDTH, WIDTH) for _ in range(3))
        self.drop = nnx.Dropout(dropout, rngs=rngs.fork()) if dropout else None

    def __call__(self, x):
        if self.drop is not None:
            x = self.drop(x)
        q, k, v = (x @ w[...] for w in (self.q, self.k, self.v))
        first = 0
        if is_split(CONTEXT):
            k, v = (jax.lax.all_gather(a, CONTEXT, axis=1, tiled=True) for a in (k, v))
            first = jax.lax.axis_index(CONTEXT) * x.shape[1]
        scores = jnp.einsum("bqw,bkw->bqk", q, k)
        seen = jnp.arange(k.shape[1])[None] <= first + jnp.arange(x.shape[1])[:, None]
        mix = jax.nn.softmax(jnp.where(seen[None], scores, -1e9), axis=-1)
        return x + mix @ v


class Shifted(nnx.Module):
    """A layer that sees the position on the left, which may be another rank's: an exchange."""

    def __init__(self, rngs: nnx.Rngs, *, send=shift_right):
        self.here, self.left = (weight(rngs, WIDTH, WIDTH) for _ in range(2))
        self.send = send

    def __call__(self, x):
        h = jnp.tanh(x @ self.here[...])
        last = h[:, -1:]
        before = jnp.zeros_like(last)
        if is_split(CONTEXT):
            before = self.send(last, CONTEXT)
        moved = jnp.concatenate([before, h[:, :-1]], axis=1)
        return x + jnp.tanh(moved @ self.left[...])


def permuted(x, axis):
    """JAX's own `ppermute` to the right; the first rank receives zeros."""
    return jax.lax.ppermute(x, axis, [(n, n + 1) for n in range(jax.lax.axis_size(axis) - 1)])


def build(kind, count: int, **options) -> list[nnx.Module]:
    """Stages with weights of their own."""
    return [kind(nnx.Rngs(k, dropout=100 + k), **options) for k in range(count)]


def batch(seed: int = 0):
    """[N, T, W] inputs and targets."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return tuple(jax.random.normal(key, (ROWS, LENGTH, WIDTH)) for key in keys)


def squares(outputs, targets):
    """The mean over all entries."""
    return jnp.mean((outputs - targets) ** 2)


def counted(outputs, targets):
    """A sum over positions that count, and their number: positive targets."""
    counts = jnp.asarray(targets[..., 0] > 0, jnp.float32)
    return jnp.sum(jnp.mean((outputs - targets) ** 2, axis=-1) * counts), jnp.sum(counts)


def plain(stages, loss_fn=squares, inputs=None, targets=None):
    """The loss, and each stage's gradients, without a pipeline, of a batch as one."""
    given = batch()
    x, t = given[0] if inputs is None else inputs, given[1] if targets is None else targets
    graphdef, params, rest = nnx.split(nnx.List(stages), nnx.Param, ...)

    @jax.jit
    @jax.value_and_grad
    def run(params):
        y = x
        for stage in nnx.merge(graphdef, params, rest):
            y = stage(y)
        found = loss_fn(y, t)
        return found[0] / found[1] if isinstance(found, tuple) else found

    loss, grads = run(params)
    return loss, [grads[k] for k in range(len(stages))]


def spec_of(kind, *, data: bool = False):
    """`batch=` for a kind of stage."""
    if kind is Experts:
        return P(("data", EXPERT)) if data else P(EXPERT)
    return P("data", CONTEXT)


def mesh_of(kind, *, stage: int = 2, data: int = 1, size: int = 2):
    """A mesh with the axis of a kind of stage."""
    axis = EXPERT if kind is Experts else CONTEXT
    return make_mesh(stage=stage, data=data, **{axis: size})
