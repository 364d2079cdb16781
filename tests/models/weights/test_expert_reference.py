"""Mixtures of experts against transformers on torch: logits, gradients, words; an optional lane.

Runs where torch and transformers are installed, in an environment of their own:

    python3.12 -m venv ref && ref/bin/pip install ".[test]" torch transformers
    ref/bin/python -m pytest tests/models/weights/test_expert_reference.py -m slow

Letters: S ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import generate, weights
from pipeline.decoders import next_token_loss
from tests.models.weights.test_families import same
from tests.models.weights.tiny import read_all
from tests.support.close import assert_close, distance

WHY = "no parity of experts with the reference: it wants torch and transformers in this environment"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    **SIZES,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**SIZES, **EXPERTS}),
    "qwen2 with dense layers": (
        "Qwen2Moe",
        {
            **SIZES,
            **EXPERTS,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3": (
        "Qwen3Moe",
        {**SIZES, **EXPERTS, "head_dim": 16, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "swiglu_limit": 0.7,
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek v3 with yarn": (
        "DeepseekV3",
        {**LATENT, "n_group": 2, "topk_group": 1, "rope_scaling": {**YARN, "rope_theta": 1e4}},
    ),
}
BEFORE, WORDS = 8, 64


def reference(family: str, options: dict[str, Any]) -> Any:
    """A random model, its norms and biases too."""
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
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
    assert_close(pipe(jnp.asarray(tokens.numpy())), logits)
    own = generate(pipe, tokens[:, :BEFORE].numpy(), WORDS)
    np.testing.assert_array_equal(own, words[:, BEFORE:].numpy())
    weights.save(pipe, tmp_path / "out")
    given, out = read_all(tmp_path / "given"), read_all(tmp_path / "out")
    assert same(given, out)


MESHES = [
    ({"stage": 2, "expert": 2, "data": 2}, "1f1b"),
    ({"stage": 4, "expert": 2, "data": 1}, "zb_h1"),
    ({"stage": 2, "expert": 4, "data": 1}, "interleaved_1f1b"),
    ({"stage": 2, "expert": 2, "data": 2}, "gpipe"),
    ({"stage": 4, "expert": 2, "data": 1}, "eager_1f1b"),
    ({"stage": 2, "expert": 2, "data": 2}, "zb_v"),
    ({"stage": 2, "expert": 4, "data": 1}, "dualpipe_v"),
]
TWO_STAGES = ("interleaved_1f1b", "zb_v", "dualpipe_v")  # on every rank


@pytest.mark.parametrize(("mesh", "schedule"), MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_of_the_reference(case: str, mesh: Any, schedule: str, tmp_path: Path):
    """Gradients stand in the place of weights on both sides, so the tables undo their names."""
    model = reference(*CASES[case])
    model.save_pretrained(tmp_path / "given")
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(2, 96, (2, 16, 12))  # 0 or 1 is a padding row
    logits = model(torch.asarray(tokens)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.asarray(targets).flatten())
    loss.backward()
    stages = mesh["stage"] * (2 if schedule in TWO_STAGES else 1)
    pipe = weights.load(
        tmp_path / "given",
        4 if schedule == "dualpipe_v" else 2,
        num_stages=stages,
        mesh=make_mesh(**mesh),
        schedule=schedule,
        batch=P(("data", "expert")),
        loss_fn=next_token_loss,
    )
    found, grads = pipe.value_and_grad(jnp.asarray(tokens), jnp.asarray(targets))
    assert_close(found, loss.item())
    nnx.update(pipe, grads)
    weights.save(pipe, tmp_path / "ours")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = read_all(tmp_path / "ours"), read_all(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    far = {name: distance(ours[name], theirs[name]) for name in theirs}
    assert max(far.values()) < 1e-5, max(far, key=lambda name: far[name])
