"""The Llama-family decoder through `Pipeline`, on meshes of data, stage and tensor.

Letters: S ranks, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.layers import RMSNorm
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests import models
from tests.grids import covering

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from flax import nnx

from llama import LlamaConfig, build, loss_fn

MICROBATCHES, ROWS, LENGTH, WORDS = 4, 2, 8, 61
MESHES = {
    "2x2x2": {"data": 2, "stage": 2, "tensor": 2},
    "1x4x2": {"data": 1, "stage": 4, "tensor": 2},
    "2x4x1": {"data": 2, "stage": 4, "tensor": 1},
    "4x2x1": {"data": 4, "stage": 2, "tensor": 1},
}
FAMILIES = {"gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}
# What each changes of the model, and of the pipeline.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "zero1": ({}, {"data_parallel": "zero1"}),
    "fsdp": ({}, {"data_parallel": "fsdp"}),
    "sequence": ({"sequence_parallel": True}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "words": ({}, {"vocabulary": "stage"}),
    "sequence, tied, zero1": (
        {"sequence_parallel": True, "tie_word_embeddings": True, "loss_chunks": 2},
        {"data_parallel": "zero1"},
    ),
    "sequence, fsdp": ({"sequence_parallel": True}, {"data_parallel": "fsdp", "remat": None}),
    "words, tied, fsdp": (
        {"tie_word_embeddings": True},
        {"data_parallel": "fsdp", "vocabulary": "stage"},
    ),
}
GRID = list(itertools.product(MESHES, FAMILIES, OPTIONS))
FAST = [
    ("2x2x2", "1f1b", "sequence, tied, zero1"),
    ("1x4x2", "zb_v", "plain"),
    ("2x4x1", "eager_1f1b", "words, tied, fsdp"),
]
SLOW = covering(GRID, FAST)


def cases() -> list[Any]:
    def marks(case: tuple[str, ...]) -> list[pytest.MarkDecorator]:
        if case in FAST:
            return []
        of_ci = case in SLOW and case[0] == "2x2x2"
        return [pytest.mark.slow] if of_ci else [pytest.mark.slow, pytest.mark.exhaustive]

    return [pytest.param(*case, marks=marks(case)) for case in GRID]


def ends_by_stage(config: LlamaConfig) -> tuple[Any, Any, Any]:
    """Embed, head and loss whose words all stage ranks share."""
    rngs, width = nnx.Rngs(5), config.hidden_size
    embed = VocabularyEmbedding(config.vocab_size, width, rngs=rngs)
    norm = RMSNorm(width)
    tied = {"tied": embed} if config.tie_word_embeddings else {"rngs": rngs}
    return embed, VocabularyHead(config.vocab_size, width, norm=norm, **tied), CrossEntropy()


def data(rows: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    tokens, targets = (jax.random.randint(key, (rows, LENGTH), 0, WORDS) for key in keys)
    return tokens, targets.at[0, :3].set(-100)


@pytest.mark.parametrize(("mesh", "family", "options"), cases())
def test_parity(mesh: str, family: str, options: str) -> None:
    axes, chunks = MESHES[mesh], FAMILIES[family]
    changes, given = OPTIONS[options]
    stages = chunks * axes["stage"]
    # Shared by stage ranks, tables are padded for good, and the reference's are not.
    words = 64 if "vocabulary" in given else WORDS
    config = LlamaConfig.tiny(
        num_hidden_layers=stages, vocab_size=words, vocabulary_multiple_of=8, **changes
    )
    parts, embed, head = build(config, stages, seed=0)
    loss: Any = loss_fn(config)
    if "vocabulary" in given:
        embed, head, loss = ends_by_stage(config)
    batch = data(MICROBATCHES * ROWS * axes["data"])

    def mean(outputs: Any, targets: jax.Array) -> jax.Array:
        total, weight = loss(outputs, targets)
        return total / weight.astype(np.float32)

    want = models.reference(parts, *batch, mean, embed=embed, head=head)
    pipe = Pipeline(
        parts,
        MICROBATCHES,
        schedule=family,
        mesh=make_mesh(**axes),
        embed=embed,
        head=head,
        loss_fn=loss,
        **given,
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch), want)
