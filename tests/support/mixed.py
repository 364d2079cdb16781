"""Models whose stages are not alike, hostile to zeros like those of `models`.

Letters: b rows, t tokens, K stages.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.support import models
from tests.support.models import CLASSES, WIDTH, Hostile, normal, unit

CHANNELS, SIZE = 2, 6  # of an image
ROWS = 48
UNEVEN = {"10 layers": (2, 3, 3, 2), "30 layers": (7, 8, 8, 7)}


class Stem(nnx.Module):
    """[b, height, width, channels] images to [b, t, d] tokens, by a convolution of stride 2."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (3, 3, CHANNELS, WIDTH)))
        self.bias = normal(rngs, WIDTH)

    def __call__(self, x):
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            unit(x), self.kernel[...], (2, 2), "SAME", dimension_numbers=layout
        )
        return jnp.tanh(y + self.bias[...][None, None, None]).reshape(len(x), -1, WIDTH)


class Attention(nnx.Module):
    """A transformer block on [b, t, d]."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.qkv = normal(rngs, WIDTH, 3 * WIDTH)
        self.out = normal(rngs, WIDTH, WIDTH)
        self.up = normal(rngs, WIDTH, 2 * WIDTH)
        self.down = normal(rngs, 2 * WIDTH, WIDTH)

    def __call__(self, x):
        h = unit(x) * self.scale[...][None, None]
        q, k, v = jnp.split(h @ self.qkv[...], 3, axis=-1)
        x += jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ self.out[...]
        return x + jnp.tanh(unit(x) @ self.up[...]) @ self.down[...]


class Pooled(nnx.Module):
    """[b, t, d] tokens to [b, classes] logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, CLASSES)

    def __call__(self, x):
        return unit(x.mean(axis=1)) @ self.w[...] * 3.0


class Chain(nnx.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nnx.Module):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Packer(nnx.Module):
    """Makes rows a tree: wide floats, a narrow gate, integers and flags."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, WIDTH, 2 * WIDTH)

    def __call__(self, x):
        row = jnp.tanh(unit(x) @ self.w[...])
        return {"row": row, "kind": jnp.argmax(row, axis=-1) % 3, "keep": row[:, :3] > 0.0}


class Chooser(nnx.Module):
    """Uses the integers and the flags, and passes on other floats and the integers."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = normal(rngs, 3, 2 * WIDTH)
        self.w = normal(rngs, 2 * WIDTH, WIDTH)

    def __call__(self, x):
        row = unit(x["row"]) + self.table[...][x["kind"]]
        gate = jnp.where(x["keep"], 1.0, 0.5).sum(axis=-1, keepdims=True)
        return jnp.tanh(row @ self.w[...]) * gate, {"kind": x["kind"]}


class Closer(nnx.Module):
    """Back to rows."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = normal(rngs, 3, WIDTH)

    def __call__(self, x):
        row, others = x
        return unit(row) * self.table[...][others["kind"]]


class Halving(nnx.Module):
    """[b, d] to [b, d / 2]: scaled, and each two neighbours added."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = normal(rngs, 1, 1)

    def __call__(self, x):
        return jnp.tanh(x * self.w[...]).reshape(len(x), -1, 2).sum(axis=-1)


def scanned(layers: int, seed: int) -> nnx.Module:
    """Layers of one stacked leaf, [layers, d, d]."""
    return models.Layered(nnx.Rngs(seed), layers=layers)


def build(name: str) -> list[nnx.Module]:
    """The stages of a model."""
    blocks = [Attention(nnx.Rngs(100 + n)) for n in range(6)]
    stem, head = Stem(nnx.Rngs(7)), Pooled(nnx.Rngs(8))
    if name == "images in 4":
        cut = [[stem, blocks[0]], blocks[1:3], blocks[3:5], [blocks[5], head]]
        return [Chain(*layers) for layers in cut]
    if name == "images in 8":
        return [stem, *blocks, head]
    if name in UNEVEN:
        layers = iter(models.build(Hostile, sum(UNEVEN[name])))
        return [Chain(*itertools.islice(layers, count)) for count in UNEVEN[name]]
    if name == "scanned":
        return [scanned(n, seed) for seed, n in enumerate((1, 3, 2, 2))]
    if name == "trees":
        kinds = (Hostile, Packer, Chooser, Closer)
        return [kind(nnx.Rngs(n)) for n, kind in enumerate(kinds)]
    raise ValueError(name)


def batch(name: str) -> tuple[Any, Any]:
    """Inputs and labels or rows for a model."""
    if name.startswith("images"):
        shape = (ROWS, SIZE, SIZE, CHANNELS)
        return jax.random.normal(jax.random.key(3), shape), models.words(ROWS, most=CLASSES)
    return models.rows(ROWS), models.rows(ROWS, seed=9)


def loss_of(name: str) -> Any:
    """Its loss."""
    return models.cross_entropy if name.startswith("images") else models.squares
