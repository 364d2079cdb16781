"""Models as their authors write them, for none of which a pipeline was thought of.

Small ones, written for these tests, with what makes models hard to cut: arguments beside the
activation, results beside it, tied tables, skips, cross attention, work between blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

WORDS, WIDTH = 16, 8


def mlp(width, rngs):
    return nnx.Sequential(
        nnx.Linear(width, 2 * width, rngs=rngs), nnx.gelu, nnx.Linear(2 * width, width, rngs=rngs)
    )


def attend(q, k, mask=None):
    scores = jnp.einsum("btd,bsd->bts", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), k)


class DecoderBlock(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp = mlp(WIDTH, rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, positions, cache, mask):
        h = self.norm(x) + jnp.sin(positions)[..., None].astype(x.dtype)
        x = x + attend(self.q(h), h, mask)
        return cache, x + self.dropout(self.mlp(x))


class Decoder(nnx.Module):
    """Tied table, positions and a mask made of the inputs, (logits, cache)."""

    def __init__(self, layers=4, rngs=None, rate=0.0):
        rngs = rngs or nnx.Rngs(0)
        self.embedder = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderBlock(rngs, rate) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, cache=None, padding=None):
        length = tokens.shape[1]
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        if padding is not None:
            mask = mask & padding[:, None, :]
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        x = self.embedder(tokens)
        for layer in self.layers:
            _, x = layer(x, positions, cache, mask)
        return self.embedder.attend(self.norm(x)), cache


class VisionBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = mlp(WIDTH, rngs)

    def __call__(self, x, *, deterministic=True):
        return x + self.mlp(attend(self.norm(x), x))


class Vision(nnx.Module):
    """Blocks that are attributes with numbers, a class token, a pooled head."""

    def __init__(self, layers=4, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.patches = nnx.Conv(3, WIDTH, (2, 2), (2, 2), rngs=rngs)
        self.token = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 1, WIDTH)))
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 5, WIDTH)))
        for number in range(layers):
            setattr(self, f"block_{number}", VisionBlock(rngs))
        self.number = layers
        self.classes = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, images, *, deterministic=False):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + self.places[...]
        for number in range(self.number):
            x = getattr(self, f"block_{number}")(x, deterministic=deterministic)
        return self.classes(x[:, 0])


class Level(nnx.Module):
    def __init__(self, before, after, rngs):
        self.conv = nnx.Conv(before, after, (3, 3), rngs=rngs)
        self.time = nnx.Linear(WIDTH, after, rngs=rngs)

    def __call__(self, x, time):
        return nnx.silu(self.conv(x) + self.time(time)[:, None, None])


class UNet(nnx.Module):
    """Skips, a time embedding for all levels, work between blocks, the input again at the end."""

    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.time = nnx.Linear(1, WIDTH, rngs=rngs)
        self.first = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.downs = nnx.List([Level(4, 4, rngs), Level(4, 8, rngs)])
        self.middle = Level(8, 8, rngs)
        self.ups = nnx.List([Level(16, 4, rngs), Level(8, 4, rngs)])
        self.last = nnx.Conv(4, 2, (1, 1), rngs=rngs)

    def __call__(self, images, time):
        embedded = nnx.silu(self.time(time[:, None].astype(images.dtype)))
        x, skips = self.first(images), []
        for down in self.downs:
            x = down(x, embedded)
            skips.append(x)
            x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = self.middle(x, embedded)
        for up in self.ups:
            x = jax.image.resize(x, (*skips[-1].shape[:-1], x.shape[-1]), "nearest")
            x = up(jnp.concatenate([x, skips.pop()], axis=-1), embedded)
        return images + self.last(x)


class CrossBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = mlp(WIDTH, rngs)

    def __call__(self, x, memory, mask, memory_mask):
        x = x + attend(self.norm(x), x, mask)
        x = x + attend(x, memory, memory_mask)
        return x + self.mlp(x)


class EncoderDecoder(nnx.Module):
    """Cross attention, one table for both and for the logits, a norm between the two."""

    def __init__(self, layers=2, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.encoder = nnx.List([VisionBlock(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.decoder = nnx.List([CrossBlock(rngs) for _ in range(layers)])

    def __call__(self, source, target):
        mask = jnp.tril(jnp.ones((1, target.shape[1], target.shape[1]), bool))
        x = self.table(source)
        for block in self.encoder:
            x = block(x)
        memory, y = self.norm(x), self.table(target)
        for block in self.decoder:
            y = block(y, memory, mask, (source > 0)[:, None])
        return self.table.attend(y)
