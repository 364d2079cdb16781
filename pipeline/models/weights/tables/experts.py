"""Families with mixtures of experts: tables of names, and translations of config.json.

Letters of patterns in addition to those of `weights.tables.families`: e experts, m columns of an
expert, s columns of the shared experts. For latent attention: q width of queries' latent, r width
of keys' and values' latent, w width of a head's values, x columns of a head's queries, y = r + the
rotary columns of keys, z = w + the other columns of a head's keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.models.decoders.config import ExpertsConfig, LatentConfig
from pipeline.models.weights.tables.patterns import Row, row

Given = Mapping[str, Any]


def _rows(
    at: str, gate: str = "gate_proj", down: str = "down_proj", up: str = "up_proj"
) -> tuple[Row, ...]:
    """Return table rows of router and experts; in the file each expert is a separate matrix."""
    gate, down, up = (f"{at}.experts.{{e}}.{name}.weight" for name in (gate, down, up))
    return (
        row("experts.router_weight", "d e", (f"{at}.gate.weight", "e d")),
        row("experts.gate_up", "e d + m", (gate, "m d"), (up, "m d")),
        row("experts.down", "e m d", (down, "d m")),
    )


def _shared(at: str) -> tuple[Row, ...]:
    """Return table rows of the MLP that every token uses."""
    gate, down, up = (f"{at}.{name}_proj.weight" for name in ("gate", "down", "up"))
    return (
        row("experts.shared.gate_up", "d + s", (gate, "s d"), (up, "s d")),
        row("experts.shared.down.weight", "s d", (down, "d s")),
    )


EXPERT_ROWS = _rows("mlp")
MIXTRAL_ROWS = _rows("block_sparse_moe", "w1", "w2", "w3")
QWEN2_ROWS = (
    *EXPERT_ROWS,
    *_shared("mlp.shared_expert"),
    row("experts.shared_gate", "d 1", ("mlp.shared_expert_gate.weight", "1 d")),
)
DEEPSEEK_ROWS = (
    *EXPERT_ROWS,
    row("experts.bias", "e", ("mlp.gate.e_score_correction_bias", "e")),
    *_shared("mlp.shared_experts"),
)
GPT_OSS_ROWS = (
    row("attention.sinks", "h", ("self_attn.sinks", "h")),
    row("experts.router_weight", "d e", ("mlp.router.weight", "e d")),
    row("experts.router_bias", "e", ("mlp.router.bias", "e")),
    row("experts.gate_up", "e d + m", ("mlp.experts.gate_up_proj", "e d (m +2)")),
    row("experts.gate_up_bias", "e + m", ("mlp.experts.gate_up_proj_bias", "e (m +2)")),
    row("experts.down", "e m d", ("mlp.experts.down_proj", "e m d")),
    row("experts.down_bias", "e d", ("mlp.experts.down_proj_bias", "e d")),
)
OLMOE_NORMS = (
    row("attention.q_norm.scale", "(h c)", ("self_attn.q_norm.weight", "(h c)")),
    row("attention.k_norm.scale", "(k c)", ("self_attn.k_norm.weight", "(k c)")),
)
LATENT_ROWS = (
    row("attention.q.weight", "d (h x)", ("self_attn.q_proj.weight", "(h x) d")),
    row("attention.q_down", "d q", ("self_attn.q_a_proj.weight", "q d")),
    row("attention.q_norm.scale", "q", ("self_attn.q_a_layernorm.weight", "q")),
    row("attention.q_up.weight", "q (h x)", ("self_attn.q_b_proj.weight", "(h x) q")),
    row("attention.kv_down", "d y", ("self_attn.kv_a_proj_with_mqa.weight", "y d")),
    row("attention.kv_norm.scale", "r", ("self_attn.kv_a_layernorm.weight", "r")),
    row("attention.kv.weight", "r (h z)", ("self_attn.kv_b_proj.weight", "(h z) r")),
    row("attention.out.weight", "(h w) d", ("self_attn.o_proj.weight", "d (h w)")),
)


def _number(given: Given, key: str) -> int:
    """Read the number of experts, under any of the names in releases of transformers."""
    names = (key, "num_local_experts", "num_experts")
    number: int = given[next((name for name in names if name in given), key)]
    return number


def in_all_layers(given: Given, number: str, **options: Any) -> ExpertsConfig:
    """Return an `ExpertsConfig` with experts in every layer, their number read from a key."""
    sizes = _number(given, number), given["num_experts_per_tok"], given["intermediate_size"]
    return ExpertsConfig(*sizes, tuple(range(given["num_hidden_layers"])), **options)


def qwen(given: Given) -> ExpertsConfig:
    """Return the `ExpertsConfig` of Qwen2-MoE, with a shared expert, or of Qwen3-MoE, without."""
    step, without = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers", [])
    layers = range(given["num_hidden_layers"])
    shared = given.get("shared_expert_intermediate_size", 0)
    return ExpertsConfig(
        _number(given, "num_experts"),
        given["num_experts_per_tok"],
        given["moe_intermediate_size"],
        tuple(n for n in layers if n not in without and (n + 1) % step == 0),
        renormalise=given.get("norm_topk_prob", False),
        shared_hidden=shared,
        shared_gate=shared > 0,
    )


def deepseek(given: Given, version: int) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a DeepSeek checkpoint's config, of version 2 or 3."""
    layers, hidden = given["num_hidden_layers"], given["moe_intermediate_size"]
    limited = version == 3 or given.get("topk_method", "greedy") == "group_limited_greedy"
    return ExpertsConfig(
        _number(given, "n_routed_experts"),
        given["num_experts_per_tok"],
        hidden,
        tuple(range(given.get("first_k_dense_replace", 0), layers)),
        scoring="sigmoid" if version == 3 else "softmax",
        renormalise=given.get("norm_topk_prob", True) if version == 3 else False,
        scale=given.get("routed_scaling_factor", 1.0),
        groups=(given["n_group"], given["topk_group"]) if limited else None,
        group_top=2 if version == 3 else 1,
        selection_bias=version == 3,
        shared_hidden=hidden * (given.get("n_shared_experts") or 0),
    )


def latent(given: Given) -> LatentConfig:
    keys = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    return LatentConfig(given.get("q_lora_rank"), *(given[key] for key in keys))


def latent_scale(given: Given) -> float:
    """Return the factor of scores, which is larger with YaRN."""
    scale = float((given["qk_nope_head_dim"] + given["qk_rope_head_dim"]) ** -0.5)
    rope: Mapping[str, Any] = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim"):
        return scale
    return scale * yarn_amplitude(rope["factor"], rope["mscale_all_dim"]) ** 2


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
