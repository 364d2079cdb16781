"""The main job as functions that a configuration names: a byte-level GPT, its batches, its test.

cd examples
XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pipeline train --config gpt.toml
"""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

import corpus
import gpt


def model(
    *,
    stages: int = 4,
    layers: int = 4,
    width: int = 96,
    heads: int = 4,
    context: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """The parts of a pipeline."""
    made, embed, head = gpt.build(gpt.Sizes(layers, width, heads, context), stages, seed)
    return {"stages": made, "embed": embed, "head": head, "loss_fn": gpt.loss_fn}


def data(*, batch_size: int = 32, context: int = 128, seed: int = 0) -> grain.IterDataset:
    """Batches of random windows, without end: each follows from its number."""
    return batches(corpus.read().train, batch_size=batch_size, context=context, seed=seed)


def batches(text: corpus.Bytes, *, batch_size: int, context: int, seed: int) -> grain.IterDataset:
    """Batches of a text. Their iterator's position is a number, which a checkpoint keeps."""

    def one(step: Any) -> tuple[corpus.Tokens, corpus.Tokens]:
        return corpus.batch(text, step=int(step), seed=seed, size=batch_size, context=context)

    numbered = grain.MapDataset.range(2**31 - 1).map(one)
    return numbered.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))


def held_out(
    *, count: int = 32, batch_size: int = 32, context: int = 128
) -> list[tuple[corpus.Tokens, corpus.Tokens]]:
    """Batches of windows spread evenly over the files that training never sees."""
    text = corpus.read().held_out
    tokens, targets = corpus.even_windows(text, count=count * batch_size, context=context)
    return list(zip(np.split(tokens, count), np.split(targets, count), strict=True))
