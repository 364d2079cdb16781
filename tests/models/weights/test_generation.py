"""Text by caches from a checkpoint is that of its model without caches, token for token.

Letters: S ranks, N prompts of P tokens.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import Pipeline, generate, weights
from pipeline.models.decoding import generate as decoding
from pipeline.models.decoding.caches import keeps_caches, takes_many
from tests.models.weights import tiny
from tests.support.grids import effort

N, P, NEW, LAYERS = 3, 6, 10, 5
PROMPTS = np.random.default_rng(0).integers(0, tiny.WORDS, (N, P))
LENGTHS = np.array([6, 4, 5])
GRID = list(itertools.product(tiny.CONFIGS, (1, 2, 4)))
FAST = [("llama", 2)]
SLOW = [("gpt2", 1), ("mistral", 1), ("gemma2", 2), ("gemma3_text", 4)]


def cases():
    for case in GRID:
        yield pytest.param(*case, marks=effort(case, FAST, SLOW), id=f"{case[0]}-{case[1]}")


def checkpoint(folder: Path, name: str, dtype: Any = np.float32, stored: str = "F32") -> Path:
    """One of more layers than ranks, so that stages are unlike, and windows end within them."""
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    config = {**tiny.CONFIGS[name], layers: LAYERS}
    tensors = tiny.tensors_of(config, dtype=dtype)
    if name == "gpt2":
        tensors["transformer.wpe.weight"] *= 6  # else it repeats one word
    return tiny.write(folder / name, config, tensors, dtype=stored)


def recomputed(pipe: Pipeline, lengths: np.ndarray) -> np.ndarray:
    """[N, NEW] the likeliest words, each by all of the model over all that is there."""
    parts: Any = pipe.embed, *pipe.stages(), pipe.head
    logits = jax.jit(lambda tokens: functools.reduce(lambda x, part: part(x), parts, tokens))
    text = np.zeros((N, P + NEW), np.int32)
    text[:, :P] = PROMPTS
    rows = np.arange(N)
    for n in range(NEW):
        at = lengths + n
        text[rows, at] = np.asarray(logits(jnp.asarray(text)))[rows, at - 1].argmax(-1)
    return text[rows[:, None], lengths[:, None] + np.arange(NEW)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "S"), list(cases()))
def test_every_family_remembers(name: str, S: int, tmp_path: Path, monkeypatch: Any):
    folder = checkpoint(tmp_path, name)
    pipe = weights.load(folder, num_stages=S, mesh=make_mesh(stage=S))
    assert keeps_caches(pipe)
    assert takes_many(pipe)
    wanted = recomputed(weights.load(folder, num_stages=1), LENGTHS)
    assert len(np.unique(wanted)) > 3
    # Prompts of 4 tokens: two calls of 2, and the rest one by one.
    monkeypatch.setattr(decoding, "MOST_AT_ONCE", 3)
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, lengths=LENGTHS), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"vocabulary": "stage"}, {"layout": "Et||ttt|tL"}, {}])
def test_other_pipelines_of_a_checkpoint(options: dict[str, Any], tmp_path: Path):
    """The words of all ranks, a stage without layers, two chunks a rank; a prompt in one call."""
    folder = checkpoint(tmp_path, "llama")
    stages = {} if "layout" in options else {"num_stages": 2 if options else 4}
    pipe = weights.load(folder, mesh=make_mesh(stage=2), **stages, **options)
    lengths = np.full(N, P)
    wanted = recomputed(weights.load(folder, num_stages=1), lengths)
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW), wanted)


@pytest.mark.slow
def test_caches_have_the_dtype_of_activations(tmp_path: Path):
    folder = checkpoint(tmp_path, "qwen2", jnp.bfloat16, "BF16")
    options: dict[str, Any] = {"num_stages": 2, "mesh": make_mesh(stage=2)}
    pipe = weights.load(folder, activations="float32", **options)
    assert pipe.stages()[0].blocks[0].attention.kept_dtype == jnp.float32
    wanted = recomputed(pipe, LENGTHS)
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, lengths=LENGTHS), wanted)
    narrow = weights.load(folder, **options).stages()[0].blocks[0].attention
    assert narrow.kept_dtype == jnp.bfloat16


def test_more_positions_than_were_learned(tmp_path: Path):
    pipe = weights.load(checkpoint(tmp_path, "gpt2"), num_stages=1)
    with pytest.raises(ValueError) as caught:
        generate(pipe, PROMPTS, 28)
    assert str(caught.value) == (
        "a sequence of 33 tokens: this model has learned 32 positions; give it no more"
    )
