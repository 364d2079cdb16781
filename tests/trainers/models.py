"""A small model with and without a pipeline, and its batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

WORDS, WIDTH, ROWS, LAYERS = 16, 8, 8, 4
MARKS = [  # of trainers that are perhaps not installed
    pytest.mark.slow,
    pytest.mark.usefixtures("lenient"),
    pytest.mark.filterwarnings("ignore"),
]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Others warn where they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.linear(self.norm(x)))


class Adapted(Block):
    """A block with an adapter of flax's own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.linear = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)


class Plain(nnx.Module):
    """The model without a pipeline."""

    def __init__(self, block: Callable[[nnx.Rngs], nnx.Module] = Block, words: int = WORDS) -> None:
        self.embed = nnx.Embed(words, WIDTH, rngs=nnx.Rngs(100))
        self.blocks = nnx.List([block(nnx.Rngs(k)) for k in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, words, rngs=nnx.Rngs(101))

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits: jax.Array, words: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


def pipelined(plain: Plain, *, data: int = 1, stage: int = LAYERS, **options: Any) -> Pipeline:
    """The model, cut into a stage for each block."""
    options = {"loss_fn": cross_entropy, "mesh": make_mesh(data=data, stage=stage), **options}
    return Pipeline(list(plain.blocks), 4, embed=plain.embed, head=plain.head, **options)


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    for n in range(count):
        words = np.random.default_rng(n).integers(WORDS, size=ROWS, dtype=np.int32)
        yield {"words": words, "targets": words * 3 % WORDS}


def assert_equal_losses(found: list[float], wanted: list[float], *, count: int) -> None:
    """To 1e-5."""
    assert len(found) == len(wanted) == count
    assert_close(found, wanted)
