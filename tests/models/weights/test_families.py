"""Checkpoints of every family mean here what they mean by definition, and come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import weights
from pipeline.models.weights.checkpoint import open_checkpoint
from pipeline.models.weights.load import describe_checkpoint
from tests.models.weights import tiny
from tests.support.close import assert_close

TOKENS = np.random.default_rng(7).integers(0, tiny.WORDS, (2, tiny.T))
SLOW = pytest.mark.slow


def same(a: tiny.Tensors, b: tiny.Tensors) -> bool:
    """True if names, dtypes and bits are equal."""
    return set(a) == set(b) and all(
        a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in a
    )


@pytest.mark.few
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "gpt2",
        *(pytest.param(n, marks=SLOW) for n in ("mistral", "qwen2", "qwen3", "gemma", "gemma2")),
    ],
)
def test_logits_are_those_of_the_definition_and_weights_come_back(name: str, tmp_path: Path):
    config = tiny.CONFIGS[name]
    tensors = tiny.tensors_of(config)
    folder = tiny.write(tmp_path / "given", config, tensors, files=3)
    pipe = weights.load(folder, 2, layout="Et|ttL", mesh=make_mesh(stage=2))
    expected = tiny.logits(config, tensors, TOKENS)
    assert_close(pipe(jnp.asarray(TOKENS)), expected)
    weights.save(pipe, tmp_path / "out", shard_bytes=3000)
    assert same(tiny.read_all(tmp_path / "out"), tensors)
    weights.save(weights.load(tmp_path / "out", num_stages=1), tmp_path / "again")
    assert same(tiny.read_all(tmp_path / "again"), tensors)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "given", "out"]


@pytest.mark.few
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_names_and_transposes_without_a_device(name: str, tmp_path: Path):
    """Every tensor of every family, to weights and back, by the tables alone."""
    config = tiny.CONFIGS[name]
    tensors = tiny.tensors_of(config, seed=1)
    read, split = by_tables(tiny.write(tmp_path / "given", config, tensors))
    assert same(split, tensors)
    d = config.get("hidden_size", config.get("n_embd"))
    for n in range(3):
        np.testing.assert_array_equal(*fused_of(tensors, read, name, n, d))


def by_tables(folder: Path) -> tuple[tiny.Tensors, tiny.Tensors]:
    """The weights of a checkpoint, and the tensors that they are split into."""
    checkpoint = open_checkpoint(folder)
    read: tiny.Tensors = {}
    split: tiny.Tensors = {}
    for entry in describe_checkpoint(checkpoint)[1]:
        weight = entry.plan.read(lambda name: checkpoint.tensors[name].array(), np.float32)
        read[entry.name] = weight
        split |= entry.plan.split(weight)
    return read, split


def fused_of(
    w: tiny.Tensors, read: tiny.Tensors, name: str, n: int, d: int
) -> tuple[np.ndarray, np.ndarray]:
    """A fused weight as it should be, head by head, and as it is."""
    found = read[f"layers.{n}.attention.qkv.linear.weight"]
    if name == "gpt2":
        q, k, v = np.split(w[f"transformer.h.{n}.attn.c_attn.weight"], 3, axis=1)
        heads, kv = 4, 4
    else:
        q, k, v = (w[f"model.layers.{n}.self_attn.{part}_proj.weight"].T for part in "qkv")
        heads, kv = 4, 2
    c = q.shape[1] // heads
    q, k, v = q.reshape(d, heads, c), k.reshape(d, kv, c), v.reshape(d, kv, c)
    group = heads // kv
    columns = []
    for head in range(kv):
        columns += [q[:, head * group + g] for g in range(group)] + [k[:, head], v[:, head]]
    return np.concatenate(columns, axis=1), found


def test_layers_come_in_order_with_the_names_of_the_checkpoint(tmp_path: Path):
    config = tiny.CONFIGS["llama"]
    tensors = tiny.tensors_of(config)
    folder = tiny.write(tmp_path / "given", config, tensors)
    # Two chunks on each rank, one stage empty.
    pipe = weights.load(folder, layout="Et||t|tL", mesh=make_mesh(stage=2))
    layers = list(weights.named_layers(pipe))
    assert [layer.name for layer in layers] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert list(layers[0].tensors) == ["model.embed_tokens.weight"]
    assert list(layers[-1].tensors) == ["model.norm.weight", "lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in layers[2].tensors)
    assert same({k: v for layer in layers for k, v in layer.tensors.items()}, tensors)


def test_bfloat16_stays_bfloat16_and_float32_is_asked_for(tmp_path: Path):
    config = tiny.CONFIGS["qwen2"]
    tensors = tiny.tensors_of(config, dtype=jnp.bfloat16)
    folder = tiny.write(tmp_path / "given", config, tensors, dtype="BF16")
    pipe = weights.load(folder, num_stages=2, mesh=make_mesh(stage=2))
    weights.save(pipe, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["torch_dtype"] == "bfloat16"
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[:4000]
    assert b"BF16" in header
    assert b"F32" not in header
    wide = weights.load(tmp_path / "out", num_stages=1, dtype="float32")
    found = {k: v for layer in weights.named_layers(wide) for k, v in layer.tensors.items()}
    assert same(found, {name: x.astype(np.float32) for name, x in tensors.items()})


def test_what_config_json_leaves_out_and_what_it_sets_to_null():
    def read(name: str, **changes: Any) -> Any:
        content = {**tiny.CONFIGS[name], **changes}
        made = weights.FAMILIES[name].config
        assert made is not None
        return made({key: value for key, value in content.items() if value != "left out"})

    plain = read("mistral", sliding_window="left out")
    assert (plain.windows, read("mistral", sliding_window=None).windows) == ((4096,) * 3, ())
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": "left out"}
    gemma = read("gemma2", **caps, hidden_activation=None, hidden_act="gelu")
    assert (gemma.attention_softcap, gemma.logit_softcap) == (None, 30.0)
    assert (gemma.activation, gemma.windows) == ("gelu_tanh", (4, None, 4))
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert read("gemma3_text", layer_types=kinds).windows == (None, 4, None)
    assert read("llama", num_key_value_heads=None, head_dim=None).kv_heads == 4
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    both = read("gemma3_text", rope_parameters=ropes)
    assert (both.rope_of(2).theta, both.rope_of(2).scaling.factor) == (5e5, 4.0)
    assert (both.rope_of(0).theta, both.rope_of(0).scaling) == (2e4, None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps=null must be a finite number > 0"),
        ("gpt2", {"layer_norm_epsilon": None}, "layer_norm_epsilon=null must be a finite number"),
        ("llama", {"rope_theta": None}, "rope_theta=null must be a finite number > 0"),
        ("llama", {"intermediate_size": None}, "intermediate_size=null must be an integer >= 1"),
        ("llama", {"hidden_act": None}, "hidden_act=null is not supported, only silu"),
        ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights=False is not supported"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar=null must be a finite"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": None}},
            "rope_scaling.low_freq_factor=null must be a finite number > 0",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": None},
            "max_window_layers=null must be an integer >= 0",
        ),
    ],
)
def test_null_where_a_value_must_be_is_refused_by_name(name, changes, message):
    """And is no default in silence (issue 52)."""
    config = weights.FAMILIES[name].config
    assert config is not None
    with pytest.raises(ValueError) as caught:
        config({**tiny.CONFIGS[name], **changes})
    assert str(caught.value).startswith(f"config.json of {name}: {message}")


def test_null_that_says_something_is_read():
    """A flag that is null is false; null of another family's key is nobody's."""
    llama = weights.FAMILIES["llama"].config
    assert llama is not None
    nulls = {"attention_bias": None, "mlp_bias": None, "num_experts_per_tok": None}
    assert llama({**tiny.CONFIGS["llama"], **nulls}) == llama(tiny.CONFIGS["llama"])
    assert llama({**tiny.CONFIGS["llama"], "rope_scaling": None}).rope.scaling is None
    rope = {"rope_type": "yarn", "factor": 4.0, "truncate": None, "beta_fast": None}
    scaling = llama({**tiny.CONFIGS["llama"], "rope_scaling": rope}).rope.scaling
    assert (scaling.truncate, scaling.beta_fast) == (False, 32)
