"""The reference implementation's logits and words, by transformers on torch; an optional lane.

Runs where torch and transformers are installed, in an environment of their own:

    python3.12 -m venv ref && ref/bin/pip install ".[test]" torch transformers
    ref/bin/python -m pytest tests/models/weights/test_reference.py -m slow
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import weights
from tests.models.weights.test_families import same
from tests.models.weights.tiny import read_all
from tests.support.close import assert_close

WHY = "no parity with the reference: it wants torch and transformers in this environment"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
WIDE = {"head_dim": 16}
WINDOW = {**WIDE, "sliding_window": 7, "query_pre_attn_scalar": 20}
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {**SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama2 tied with biases": (
        "Llama",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "llama yarn": ("Llama", {**SIZES, "rope_scaling": YARN}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 7}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, **WIDE}),
    "gemma": ("Gemma", {**SIZES, **WIDE}),
    "gemma2": ("Gemma2", {**SIZES, **WINDOW}),
    "gemma3": ("Gemma3", {**SIZES, **WINDOW, "sliding_window_pattern": 3}),
    "gpt2": ("GPT2", {**GPT2, "initializer_range": 0.1}),
}
BEFORE, WORDS = 8, 64


def reference(family: str, options: dict[str, Any]) -> Any:
    """A random model, its norms and biases too."""
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**options)
    config._attn_implementation = "eager"
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_words_of_the_reference(case: str, tmp_path: Path):
    model = reference(*CASES[case])
    model.save_pretrained(tmp_path / "given", max_shard_size="100KB")
    tokens = torch.randint(0, 96, (2, BEFORE + WORDS))
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
        words = tokens[:, :BEFORE]
        for _ in range(WORDS):
            following = model(words).logits[:, -1].argmax(-1, keepdim=True)
            words = torch.cat([words, following], 1)
    pipe = weights.load(tmp_path / "given", 2, num_stages=4, mesh=make_mesh(stage=4))
    found = np.asarray(pipe(jnp.asarray(tokens.numpy())))
    assert_close(found, logits)
    # What follows a position changes nothing before it: one program makes all words.
    own = np.zeros((2, BEFORE + WORDS), np.int32)
    own[:, :BEFORE] = tokens[:, :BEFORE]
    for at in range(BEFORE, BEFORE + WORDS):
        own[:, at] = np.asarray(pipe(jnp.asarray(own)))[:, at - 1].argmax(-1)
    np.testing.assert_array_equal(own, words.numpy())

    weights.save(pipe, tmp_path / "out")
    given, out = read_all(tmp_path / "given"), read_all(tmp_path / "out")
    assert same(given, out)
    back = type(model).from_pretrained(tmp_path / "out")
    with torch.no_grad():
        # Not bit by bit: it may choose another attention now.
        assert_close(back(tokens).logits.numpy(), logits)
