"""The Llama-family decoder through `Pipeline`, beside the plain model: one case, as a function.

    python -m tests.examples.llama_cases 2x2x4 1f1b "sequence, fsdp"

runs one in a process of its own, for meshes of more devices than the tests have.

Letters: S ranks, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import LlamaConfig, build, ends_by_stage, loss_fn

MICROBATCHES, ROWS, LENGTH, WORDS = 4, 2, 8, 61
FAMILIES = {"gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}
# What each changes of the model, and of the pipeline.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "zero1": ({}, {"data_parallel": "zero1"}),
    "fsdp": ({}, {"data_parallel": "fsdp"}),
    "sequence": ({"sequence_parallel": True}, {}),
    "sequence, gathered": ({"sequence_parallel": True}, {"remat": "gathered"}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "words": ({}, {"vocabulary": "stage"}),
    "words, sequence": ({"sequence_parallel": True}, {"vocabulary": "stage"}),
    "replicated": (
        {"num_key_value_heads": 1, "replicate_kv": True, "sequence_parallel": True},
        {"data_parallel": "zero1"},
    ),
    "sequence, tied, zero1": (
        {"sequence_parallel": True, "tie_word_embeddings": True, "loss_chunks": 2},
        {"data_parallel": "zero1"},
    ),
    "sequence, fsdp": ({"sequence_parallel": True}, {"data_parallel": "fsdp", "remat": None}),
    "words, sequence, tied, zero1": (
        {"sequence_parallel": True, "tie_word_embeddings": True},
        {"vocabulary": "stage", "data_parallel": "zero1", "remat": "gathered"},
    ),
    "words, tied, fsdp": (
        {"tie_word_embeddings": True},
        {"data_parallel": "fsdp", "vocabulary": "stage"},
    ),
}


def sizes(mesh: str) -> dict[str, int]:
    """The axes of a mesh written as data x stage x tensor."""
    return dict(zip(("data", "stage", "tensor"), map(int, mesh.split("x")), strict=True))


def data(rows: int) -> tuple[jax.Array, jax.Array]:
    """Words, and those to predict, of which three count for nothing."""
    keys = jax.random.split(jax.random.key(0))
    tokens, targets = (jax.random.randint(key, (rows, LENGTH), 0, WORDS) for key in keys)
    return tokens, targets.at[0, :3].set(-100)


def check(mesh: str, family: str, options: str, **further: Any) -> Pipeline:
    """Loss and every gradient against the plain model; returns the pipeline.

    Args:
      mesh: its sizes, such as ``2x2x2``.
      family: of the schedule.
      options: one of `OPTIONS`.
      **further: options of the pipeline beside those.
    """
    axes, (changes, given) = sizes(mesh), OPTIONS[options]
    where = make_mesh(**axes)
    stages = FAMILIES[family] * axes["stage"]
    # Shared by stage ranks, tables are padded for good, and the reference's are not.
    words = 64 if "vocabulary" in given else WORDS
    config = LlamaConfig.tiny(
        num_hidden_layers=stages, vocab_size=words, vocabulary_multiple_of=8, **changes
    )
    parts, embed, head = build(config, stages, seed=0)
    loss: Any = loss_fn(config)
    if "vocabulary" in given:
        embed, head, loss = ends_by_stage(config, seed=5)
    batch = data(MICROBATCHES * ROWS * axes["data"])

    def mean(outputs: Any, targets: jax.Array) -> jax.Array:
        total, weight = loss(outputs, targets)
        return total / weight.astype(np.float32)

    want = models.reference(parts, *batch, mean, embed=embed, head=head)
    pipe = Pipeline(
        parts,
        MICROBATCHES,
        schedule=family,
        mesh=where,
        embed=embed,
        head=head,
        loss_fn=loss,
        **{**given, **further},
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch), want)
    return pipe


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    check(*sys.argv[1:])
