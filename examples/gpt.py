"""A decoder-only GPT over bytes, in the three parts a pipeline wants: embed, stages, head.

Letters: b sequences of a microbatch, t positions, d width, h heads, v = 256 byte values.
Blocks are pre-norm and have no biases: the gradient of a key bias is exactly zero, so what
arrives is rounding noise, and Adam would blow that noise up to full steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY = 256


class Sizes(NamedTuple):
    """Dimensions of the model."""

    layers: int
    width: int
    heads: int
    context: int


class Linear(nnx.Module):
    """A matrix without bias, applied as one flat product: [b, t, d] -> [b, t, e].

    XLA's CPU backend takes up to half as long again for the gradients of a product
    [b, t, d] @ [d, e] as for those of [b t, d] @ [d, e].
    """

    def __init__(self, width: int, out: int, rngs: nnx.Rngs, *, scale: float = 1.0):
        self.weight = nnx.Param(rngs.params.normal((width, out)) * (scale * width**-0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.reshape(-1, x.shape[-1]) @ self.weight[...]).reshape(*x.shape[:-1], -1)


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream: [b, t, d] -> [b, t, d]."""

    prefills = True  # its caches take any number of tokens in one call

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        d = sizes.width
        quiet = (2 * sizes.layers) ** -0.5  # the sum of all branches stays near its input
        self.heads, self.context = sizes.heads, sizes.context
        self.attention_norm = nnx.RMSNorm(d, rngs=rngs)
        self.qkv = Linear(d, 3 * d, rngs)
        self.mix = Linear(d, d, rngs, scale=quiet)
        self.mlp_norm = nnx.RMSNorm(d, rngs=rngs)
        self.up = Linear(d, 4 * d, rngs)
        self.down = Linear(4 * d, d, rngs, scale=quiet)

    def start_decoding(self, rows: int, length: int) -> None:
        """Have room for the keys and values of that many sequences of that many positions."""
        shape = rows, self.heads, length, self.mix.weight.shape[0] // self.heads
        self.keys, self.values = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))
        self.seen = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.mix(self.attend(self.qkv(self.attention_norm(x))))
        # Squared ReLU (So et al., arXiv:2109.08668) takes half the time of GELU here.
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))

    def attend(self, qkv: jax.Array) -> jax.Array:
        """Attention to these positions, and to those before that it remembers."""
        if not hasattr(self, "seen"):
            return attention(qkv, self.heads)
        q, k, v = split_heads(qkv, self.heads)
        first = self.seen[...]
        positions = first + jnp.arange(q.shape[2])
        for cache, new in ((self.keys, rotate(k, positions)), (self.values, v)):
            cache[...] = jax.lax.dynamic_update_slice(cache[...], new, (0, 0, first, 0))
        self.seen[...] = positions[-1] + 1
        back = positions[:, None] - jnp.arange(self.keys.shape[2])[None]
        seen = (back >= 0) & (back < self.context)  # no further than in training
        return attend(rotate(q, positions), self.keys[...], self.values[...], seen)


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention with rotary positions: [b, t, 3 d] -> [b, t, d]."""
    q, k, v = split_heads(qkv, heads)
    positions = np.arange(q.shape[2])
    seen = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
    return attend(rotate(q, positions), rotate(k, positions), v, seen)


def split_heads(qkv: jax.Array, heads: int) -> jax.Array:
    """[b, t, 3 d] -> [3, b, h, t, d / h]."""
    return jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), (2, 3), (0, 2))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """[b, h, t, c] queries to keys and values that they may see, [t, s]: -> [b, t, h c]."""
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e30))
    mixed = jnp.moveaxis(jnp.einsum("bhqk,bhkc->bhqc", weights, v), 1, 2)
    return mixed.reshape(*mixed.shape[:2], -1)


def rotate(x: jax.Array, positions: Any) -> jax.Array:
    """Rotary positions (Su et al., arXiv:2104.09864): [b, h, t, d / h] -> the same shape.

    Angles of positions that are known are computed before the step, in 64 bits.
    """
    lib = np if isinstance(positions, np.ndarray) else jnp
    half = x.shape[3] // 2
    turns = 1000.0 ** (-np.arange(half)[None] / half)
    angles = lib.asarray(positions, lib.result_type(float))[:, None] * lib.asarray(turns)
    cos = jnp.asarray(lib.cos(angles)[None, None], x.dtype)
    sin = jnp.asarray(lib.sin(angles)[None, None], x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Stage(nnx.Module):
    """Consecutive blocks: one stage of the pipeline."""

    def __init__(self, sizes: Sizes, blocks: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Embed(nnx.Module):
    """Bytes to vectors: [b, t] int32 -> [b, t, d]."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.table = nnx.Param(rngs.params.normal((VOCABULARY, sizes.width)) * 0.5)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.table[...], tokens, axis=0)


class Head(nnx.Module):
    """Vectors to logits of the next byte: [b, t, d] -> [b, t, v]."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.logits = Linear(sizes.width, VOCABULARY, rngs, scale=0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.logits(self.norm(x))


def build(sizes: Sizes, stages: int, seed: int) -> tuple[list[Stage], Embed, Head]:
    """Equal stages, embed and head. Weights do not depend on how many stages share the layers."""
    rngs = nnx.Rngs(seed)
    embed, head = Embed(sizes, rngs), Head(sizes, rngs)
    return [Stage(sizes, sizes.layers // stages, rngs) for _ in range(stages)], embed, head


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of a microbatch, in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
