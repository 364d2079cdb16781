"""Functions that the configurations of these tests name: parts of a model over bytes, batches."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from pipeline import CrossEntropy
from tests.support import models
from tests.support.models import WIDTH
from tests.training.plain import Chain

ROWS, CONTEXT, BYTES = 8, 4, 256


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = models.normal(rngs, BYTES, WIDTH)

    def __call__(self, words):
        return self.table[...][words]


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, WIDTH, BYTES)

    def __call__(self, x):
        return x @ self.w[...]


def parts(layers: int = 2) -> dict[str, Any]:
    """A model whose next byte follows from the last."""
    ends = {"embed": Embed(nnx.Rngs(3)), "head": Head(nnx.Rngs(4))}
    return {"stages": models.build(models.Block, layers), "loss_fn": CrossEntropy(), **ends}


def module() -> Chain:
    """A plain model of vectors."""
    return Chain(models.build(models.Block, 2), models.Readout(nnx.Rngs(5)), models.cross_entropy)


def batch(index: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that count up."""
    start = np.random.default_rng(index).integers(97, 110, (rows, 1))
    tokens = (start + np.arange(CONTEXT + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def data(rows: int = ROWS) -> Any:
    """Without end, with a position."""
    source = grain.MapDataset.range(10**6).map(lambda n: batch(int(n), rows))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def held_out() -> list:
    """Batches of eight rows, and of five."""
    return [batch(10**6 + 1), batch(10**6 + 2, 5)]


def with_axes() -> dict[str, Any]:
    """A model whose function says how a batch is split, and what makes no difference to stages."""
    made = parts()
    for number, stage in enumerate(made["stages"]):
        stage.number = stage.other = number
    return made | {"batch": P(("data", "expert"), "context"), "ignore": ("number", "other")}
