"""Checkpoints with mixtures of experts come back bit for bit, on any number of ranks.

What they mean is asked of transformers (`test_expert_reference`), where it is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import generate, weights
from pipeline.decoders import next_token_loss
from pipeline.layers import Context, zigzag
from pipeline.models.decoding.caches import keeps_caches, takes_many
from tests.models.weights import tiny
from tests.models.weights.test_families import by_tables, same
from tests.models.weights.test_generation import recomputed
from tests.support.close import assert_close

E, M, S = 4, 6, 10  # experts, columns of one, columns of the shared ones
BASE = {**tiny.LLAMA, "hidden_size": 16, "num_hidden_layers": 3}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": M,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 6,
    "q_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_group": 2,
    "topk_group": 1,
}
QWEN = {**BASE, "num_experts": E, "num_experts_per_tok": 2, "moe_intermediate_size": M}
LOCAL = {**BASE, "num_local_experts": E, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "mixtral": {**LOCAL, "sliding_window": None},
    "gpt_oss": {**LOCAL, "head_dim": 4, "sliding_window": 4},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": S, "mlp_only_layers": [1]},
    "qwen3_moe": {**QWEN, "head_dim": 4, "norm_topk_prob": True},
    "olmoe": {**BASE, "num_experts": E, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
}


def config_of(name: str) -> dict[str, Any]:
    return {**CONFIGS[name], "model_type": name}


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the family's checkpoints have."""
    config = config_of(name)
    d, f, c, kv = 16, 24, 4, config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tiny.WORDS, d)}

    def mlp(at: str, columns: int, names: tuple[str, ...] = ("gate", "up", "down")) -> None:
        gate, up, down = names
        suffix = "_proj.weight" if gate == "gate" else ".weight"
        found[f"{at}{gate}{suffix}"] = found[f"{at}{up}{suffix}"] = columns, d
        found[f"{at}{down}{suffix}"] = d, columns

    for n in range(3):
        at = f"model.layers.{n}."
        found |= {f"{at}{norm}.weight": (d,) for norm in NORMS}
        found |= {f"{at}self_attn.{k}": v for k, v in attention(name, d, c, kv).items()}
        dense = name.startswith("deepseek") and n == 0
        if dense or (name == "qwen2_moe" and n == 1):
            mlp(f"{at}mlp.", f)
        elif name == "gpt_oss":
            experts = f"{at}mlp.experts."
            found |= {f"{at}mlp.router.weight": (E, d), f"{at}mlp.router.bias": (E,)}
            found[f"{experts}gate_up_proj"], found[f"{experts}down_proj"] = (E, d, 2 * f), (E, f, d)
            found[f"{experts}gate_up_proj_bias"] = E, 2 * f
            found[f"{experts}down_proj_bias"] = E, d
        else:
            moe = f"{at}block_sparse_moe." if name == "mixtral" else f"{at}mlp."
            names = ("w1", "w3", "w2") if name == "mixtral" else ("gate", "up", "down")
            found[f"{moe}gate.weight"] = E, d
            for e in range(E):
                mlp(f"{moe}experts.{e}.", f if name in ("mixtral", "olmoe") else M, names)
            if name == "qwen2_moe":
                mlp(f"{moe}shared_expert.", S)
                found[f"{moe}shared_expert_gate.weight"] = 1, d
            if name.startswith("deepseek"):
                mlp(f"{moe}shared_experts.", M)
            if name == "deepseek_v3":
                found[f"{moe}gate.e_score_correction_bias"] = (E,)
    return found | {"model.norm.weight": (d,), "lm_head.weight": (tiny.WORDS, d)}


NORMS = "input_layernorm", "post_attention_layernorm"


def attention(name: str, d: int, c: int, kv: int) -> dict[str, tuple[int, ...]]:
    if name.startswith("deepseek"):
        found: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (8, d),
            "kv_a_layernorm.weight": (6,),
            "kv_b_proj.weight": (4 * 7, 6),
            "o_proj.weight": (d, 4 * 3),
        }
        if name == "deepseek_v2":
            return found | {"q_proj.weight": (4 * 6, d)}
        down = {"q_a_proj.weight": (5, d), "q_a_layernorm.weight": (5,)}
        return found | down | {"q_b_proj.weight": (4 * 6, 5)}
    rows = {"q": 4 * c, "k": kv * c, "v": kv * c}
    found = {f"{part}_proj.weight": (size, d) for part, size in rows.items()}
    found["o_proj.weight"] = d, 4 * c
    if name in ("qwen2_moe", "gpt_oss"):
        found |= {f"{part}_proj.bias": (size,) for part, size in rows.items()}
    if name == "gpt_oss":
        found |= {"o_proj.bias": (d,), "sinks": (4,)}
    if name in ("qwen3_moe", "olmoe"):
        whole = name == "olmoe"
        found |= {"q_norm.weight": (4 * c if whole else c,)}
        found |= {"k_norm.weight": (kv * c if whole else c,)}
    return found


def tensors_of(name: str) -> tiny.Tensors:
    rng = np.random.default_rng(3)
    return {
        key: rng.normal(size=shape).astype(np.float32) * (1 if len(shape) == 1 else 0.4)
        for key, shape in shapes_of(name).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_back_and_text_is_the_same_on_any_ranks(name: str, tmp_path: Path):
    tensors = tensors_of(name)
    folder = tiny.write(tmp_path / "given", config_of(name), tensors, files=2)
    pipe = weights.load(folder, 2, layout="Et|ttL", mesh=make_mesh(stage=2))
    weights.save(pipe, tmp_path / "out")
    assert same(tiny.read_all(tmp_path / "out"), tensors)
    whole = weights.load(folder, 1, num_stages=1)
    tokens = np.random.default_rng(0).integers(0, tiny.WORDS, (4, 6))
    assert_close(pipe(jnp.asarray(tokens)), np.asarray(whole(jnp.asarray(tokens))))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_every_family_takes_a_context_axis(name: str, way: Any, tmp_path: Path):
    """The loss of sequences on two ranks is that of whole ones, with latents and with sinks."""
    folder = tiny.write(tmp_path / "given", config_of(name), tensors_of(name))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.WORDS, (2, 9)))
    given: dict[str, Any] = {"loss_fn": next_token_loss}
    whole = weights.load(folder, 2, num_stages=1, **given)
    pipe = weights.load(
        folder,
        2,
        layout="Et|ttL",
        mesh=make_mesh(stage=2, context=2),
        context=Context("context", way, "zigzag"),
        batch=P("data", "context"),
        **given,
    )
    batch = zigzag((tokens[:, :-1], tokens[:, 1:]), 2)
    assert_close(pipe.loss(*batch), whole.loss(tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_remembers(name: str, tmp_path: Path):
    folder = tiny.write(tmp_path / "given", config_of(name), tensors_of(name))
    pipe = weights.load(folder, layout="Et|ttL", mesh=make_mesh(stage=2))
    assert keeps_caches(pipe)
    assert takes_many(pipe)
    from tests.models.weights.test_generation import LENGTHS, NEW, PROMPTS

    wanted = recomputed(weights.load(folder, num_stages=1), LENGTHS)
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, lengths=LENGTHS), wanted)


@pytest.mark.few
@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_transposes_without_a_device(name: str, tmp_path: Path):
    tensors = tensors_of(name)
    read, split = by_tables(tiny.write(tmp_path / "given", config_of(name), tensors))
    if name == "deepseek_v3":
        up = tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
        np.testing.assert_array_equal(read["layers.2.experts.gate_up"][3, :, 1], up.T)
    assert same(split, tensors)


def test_a_checkpoint_whose_experts_disagree_with_its_config_is_refused(tmp_path: Path):
    tensors = tensors_of("mixtral")
    config = {**config_of("mixtral"), "num_local_experts": 5}
    folder = tiny.write(tmp_path / "more", config, tensors)
    with pytest.raises(ValueError) as error:
        weights.load(folder, num_stages=1)
    text = str(error.value)
    gate = "model.layers.0.block_sparse_moe.gate.weight is [4, 16], and by the sizes of config.json"
    assert f"{gate} it is [5, 16]" in text
    assert "model.layers.0.block_sparse_moe.experts.4.w1.weight is missing" in text
    config["num_local_experts"] = 3
    folder = tiny.write(tmp_path / "fewer", config, tensors)
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight.*no weight of the model"):
        weights.load(folder, num_stages=1)
    del config["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"num_local_experts is missing"):
        weights.load(folder, num_stages=1)
    with pytest.raises(ValueError) as error:
        read(num_local_experts=4, num_experts_per_tok=9)
    assert str(error.value) == (
        "config.json of mixtral: DecoderConfig: top_k=9 with num_experts=4: a token is given to "
        "different experts; choose top_k of 1 to 4"
    )


def read(**changes: Any) -> Any:
    made = weights.FAMILIES["mixtral"].config
    assert made is not None
    return made({**config_of("mixtral"), **changes})


def test_options_of_experts_that_no_checkpoint_says(tmp_path: Path):
    folder = tiny.write(tmp_path / "given", config_of("mixtral"), tensors_of("mixtral"))
    pipe = weights.load(folder, num_stages=1, experts={"dispatch": "capacity", "z_weight": 0.1})
    moe = pipe.stages()[0].blocks[0].experts
    assert (moe.dispatch, moe.z_weight) == ("capacity", 0.1)
    with pytest.raises(ValueError) as error:
        weights.load(folder, num_stages=1, experts={"top_k": 3})
    assert str(error.value) == (
        "experts={'top_k': 3} has 'top_k'; options of experts are dispatch, capacity_factor, "
        "chunk, balance_weight, balance, z_weight, counts, bias_rate"
    )
    other = tiny.write(tmp_path / "dense", tiny.CONFIGS["llama"], {})
    with pytest.raises(ValueError) as error:
        weights.load(other, num_stages=1, experts={"z_weight": 0.1})
    assert str(error.value).startswith("experts={'z_weight': 0.1} for a checkpoint without experts")
