"""The Llama-family example: what its configuration reads, its size, and parity in parts."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import TENSOR
from pipeline.layers import RopeScaling, check_axis
from tests.support.group import Parts, assert_parity, mesh, specs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama
from llama import Llama, LlamaConfig
from tests.support.close import assert_close

# As the Hugging Face configuration of Llama 3.1 8B has it, of which only some keys matter here.
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}

WORDS = 61


def batch(*, most: int = WORDS, length: int = 8) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    tokens, targets = (jax.random.randint(key, (2, length), 0, most) for key in keys)
    return tokens, targets.at[0, :3].set(-100)


def small(**changes: Any) -> LlamaConfig:
    sizes = {"num_hidden_layers": 2, "vocab_size": WORDS, "vocabulary_multiple_of": 8}
    return LlamaConfig.tiny(**{**sizes, **changes})


# --- configuration ---


def test_reads_what_is_published(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED))
    found = LlamaConfig.from_json(path, sequence_parallel=True)
    wanted = LlamaConfig.llama_8b(sequence_parallel=True, rope_scaling=RopeScaling())
    assert found == wanted


def test_reads_the_later_form_and_the_defaults_of_the_format() -> None:
    content = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 100,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
    }
    assert LlamaConfig.from_dict(content) == LlamaConfig(
        64, 2, 4, 4, 96, 100, 32, 123.0, rms_norm_eps=1e-6, tie_word_embeddings=True
    )
    del content["rope_parameters"]
    assert LlamaConfig.from_dict(content).rope_theta == 10000.0
    assert LlamaConfig.from_dict(content, rope_theta=7.0).rope_theta == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": None, "vocab_size": None},
            "LlamaConfig.from_dict: hidden_size is missing; vocab_size is missing",
        ),
        (
            {"hidden_act": "gelu", "attention_bias": True},
            (
                "LlamaConfig.from_dict: hidden_act='gelu' is not supported, only 'silu'; "
                "attention_bias=True is not supported, only False"
            ),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            (
                "LlamaConfig.from_dict: rope_scaling of type 'linear' is not supported, only "
                "'llama3' and 'default'"
            ),
        ),
        (
            {"num_hidden_layers": 0, "vocab_size": "many"},
            (
                "LlamaConfig: num_hidden_layers=0 must be an integer >= 1; vocab_size='many' must "
                "be an integer >= 1"
            ),
        ),
        (
            {"num_key_value_heads": 5, "num_attention_heads": 24},
            (
                "LlamaConfig: num_attention_heads=24 is no multiple of num_key_value_heads=5; "
                "hidden_size=4096 is no multiple of num_attention_heads=24: give head_dim"
            ),
        ),
        (
            {"head_dim": 7},
            "LlamaConfig: head_dim=7 is odd: rotary positions turn pairs",
        ),
    ],
)
def test_refuses_what_it_cannot_be(changes: dict[str, Any], message: str) -> None:
    content = {**PUBLISHED, **changes}
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(ValueError) as caught:
        LlamaConfig.from_dict(content)
    assert str(caught.value) == message


def test_refuses_what_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ValueError) as caught:
        LlamaConfig.from_json(path)
    assert str(caught.value) == "a configuration is a JSON object, not list"
    path.write_text("{")
    with pytest.raises(ValueError) as caught:
        LlamaConfig.from_json(path)
    assert str(caught.value).startswith(f"{path} is no JSON: ")
    with pytest.raises(ValueError) as caught:
        LlamaConfig.tiny(dtype="int32", param_dtype="halves")
    assert str(caught.value) == (
        "LlamaConfig: dtype='int32' must be the name of a float type, such as 'bfloat16'; "
        "param_dtype='halves' must be the name of a float type, such as 'bfloat16'"
    )


# --- size ---


@pytest.mark.few
@pytest.mark.parametrize(
    ("config", "billions"),
    [(LlamaConfig.llama_8b(), 8.03), (LlamaConfig.llama_70b(scan_layers=True), 70.6)],
)
def test_published_sizes(config: LlamaConfig, billions: float) -> None:
    """None of it is allocated."""
    count = llama.count_parameters(config)
    assert count == config.count()
    assert round(count / 1e9, 3 - len(str(int(billions)))) == pytest.approx(billions, abs=0.05)


def test_padding_and_tying_count() -> None:
    padded = LlamaConfig.tiny(vocab_size=WORDS, vocabulary_multiple_of=8)
    assert llama.count_parameters(padded) == padded.count() + 2 * 3 * padded.hidden_size
    tied = LlamaConfig.tiny(tie_word_embeddings=True)
    assert llama.count_parameters(tied) == tied.count()
    assert tied.count() == LlamaConfig.tiny().count() - tied.vocab_size * tied.hidden_size


@pytest.mark.slow
def test_published_sizes_divide_among_eight() -> None:
    for config in (LlamaConfig.llama_8b(), LlamaConfig.llama_70b()):
        one = nnx.eval_shape(lambda c=config: llama.build(c, c.num_hidden_layers, 0)[0][0])
        check_axis(one, TENSOR, 8)


# --- stages ---


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (6, 4, [1, 2, 2, 1]), (5, 3, [2, 2, 1])],
)
def test_stages_at_the_ends_get_fewer_blocks(layers: int, stages: int, counts: list[int]) -> None:
    config = LlamaConfig.tiny(num_hidden_layers=layers)
    made = nnx.eval_shape(lambda: nnx.List(llama.stages(config, stages, nnx.Rngs(0))))
    assert sorted(counts) == sorted(len(stage.blocks) for stage in made)
    assert [len(stage.blocks) for stage in made] == counts


def test_weights_do_not_depend_on_the_number_of_stages() -> None:
    one, embed, head = llama.build(small(), 1, 7)
    two, embed_again, head_again = llama.build(small(), 2, 7)
    blocks = [nnx.state(b) for stage in two for b in stage.blocks]
    for a, b in zip([nnx.state(b) for b in one[0].blocks], blocks, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    np.testing.assert_array_equal(embed.table[...], embed_again.table[...])
    np.testing.assert_array_equal(head.logits.table[...], head_again.logits.table[...])


def test_too_many_stages() -> None:
    with pytest.raises(ValueError) as caught:
        llama.stages(LlamaConfig.tiny(), 5, nnx.Rngs(0))
    assert str(caught.value) == (
        "num_stages=5: 4 blocks fill 1 to 4 stages, each with one at least"
    )


def test_metadata_of_stacked_blocks() -> None:
    stage = Llama(small(scan_layers=True)).stages[0]
    found = specs(nnx.state(stage))
    assert P(None, None, None, TENSOR) in found  # gate and up of each layer
    assert stage.blocks.mlp.gate_up.shape == (2, 32, 2, 48)


# --- the function ---


def call(model: Llama, tokens: jax.Array) -> Any:
    return model(tokens)


def mean_loss(config: LlamaConfig) -> Any:
    loss = llama.loss_fn(config)

    def call(model: Llama, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        total, weight = loss(model(tokens), targets)
        return total / weight.astype(total.dtype)

    return call


FORMS: dict[str, dict[str, Any]] = {
    "scan": {"scan_layers": True},
    "remat": {"remat_blocks": True},
    "scan_and_remat": {"scan_layers": True, "remat_blocks": True},
    "query_chunk": {"query_chunk": 4},
    "loss_chunks": {"loss_chunks": 2},
    "sequence_parallel": {"sequence_parallel": True},
    "all": {"scan_layers": True, "remat_blocks": True, "query_chunk": 4, "loss_chunks": 4},
}


@functools.cache
def loss_and_size_of_gradients(form: str) -> tuple[float, float]:
    tokens, targets = batch()
    config = small(**FORMS.get(form, {}))
    parts = Parts(Llama(config, seed=3), mean_loss(config))
    loss, grads = jax.jit(jax.value_and_grad(lambda w: parts(w, tokens, targets)))(parts.leaves)
    return float(loss), sum(float(np.sum(np.asarray(g) ** 2)) for g in grads)


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f == "all" else pytest.mark.slow) for f in FORMS]
)
def test_every_form_is_the_same_function(form: str) -> None:
    found, wanted = loss_and_size_of_gradients(form), loss_and_size_of_gradients("plain")
    assert_close(found, wanted)


def test_a_masked_target_changes_nothing() -> None:
    config = small(num_hidden_layers=1)
    parts, (tokens, targets) = Parts(Llama(config), call), batch()
    logits = jax.jit(parts)(parts.leaves, tokens)
    total, weight = llama.loss_fn(config)(logits, targets)
    assert weight == 13
    wanted = -jax.nn.log_softmax(logits[..., :WORDS])
    picked = jnp.take_along_axis(wanted, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    assert_close(total, jnp.where(targets == -100, 0, picked).sum())


CASES = [
    ({}, 4),
    ({"sequence_parallel": True, "scan_layers": True, "remat_blocks": True}, 4),
    ({"sequence_parallel": True, "tie_word_embeddings": True, "loss_chunks": 2}, 2),
    ({"tie_word_embeddings": True, "query_chunk": 4}, 2),
    ({"sequence_parallel": True}, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "ranks"), CASES)
def test_parity_in_parts(changes: dict[str, Any], ranks: int) -> None:
    config = small(**changes)
    assert_parity(Llama(config), mean_loss(config), *batch(), ranks=ranks)


@pytest.mark.slow
def test_bfloat16_activations_of_float32_weights() -> None:
    tokens, targets = batch()
    exact = float(mean_loss(small())(Llama(small()), tokens, targets))
    config = small(dtype="bfloat16", sequence_parallel=True)
    parts = Parts(Llama(config), mean_loss(config))
    run = jax.shard_map(
        parts, mesh=mesh(4), in_specs=(parts.specs, P(), P()), out_specs=P(), check_vma=True
    )
    loss, grads = jax.jit(jax.value_and_grad(run))(parts.leaves, tokens, targets)
    assert abs(float(loss) - exact) < 1e-2
    assert {g.dtype for g in grads} == {jnp.dtype("float32")}
