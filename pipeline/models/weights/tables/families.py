"""Families of checkpoints, each a table: keys of config.json, and tensors of each weight.

Letters of patterns: d width, v words, k heads of keys and values, g heads of queries for each, h
all heads of queries, c width of a head, f columns of the MLP, p learned positions, u = 2 d; e
experts, m columns of an expert, s columns of the shared experts. For latent attention: q width of
queries' latent, r width of keys' and values' latent, w width of a head's values, x columns of a
head's queries, y = r + the rotary columns of keys, z = w + the other columns of a head's keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.base.files import Kind, faults_of, null_fault, shown
from pipeline.models.decoders.config import (
    Activation,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    Rope,
)
from pipeline.models.layers.rotary import LinearScaling, RopeScaling, YarnScaling
from pipeline.models.weights.tables.patterns import Config, Family, Row, row

# ---- names and transposes ----------------------------------------------------------------------


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

_ATTENTION = (
    row(
        "attention.qkv.linear.weight",
        "d (k + c)",
        ("self_attn.q_proj.weight", "(k +g c) d"),
        ("self_attn.k_proj.weight", "(k c) d"),
        ("self_attn.v_proj.weight", "(k c) d"),
    ),
    row(
        "attention.qkv.linear.bias",
        "(k + c)",
        ("self_attn.q_proj.bias", "(k +g c)"),
        ("self_attn.k_proj.bias", "(k c)"),
        ("self_attn.v_proj.bias", "(k c)"),
    ),
    row("attention.q_norm.scale", "c", ("self_attn.q_norm.weight", "c")),
    row("attention.k_norm.scale", "c", ("self_attn.k_norm.weight", "c")),
    row("attention.out.weight", "(h c) d", ("self_attn.o_proj.weight", "d (h c)")),
    row("attention.out.bias", "d", ("self_attn.o_proj.bias", "d")),
)
_MLP = (
    row("mlp.gate_up", "d + f", ("mlp.gate_proj.weight", "f d"), ("mlp.up_proj.weight", "f d")),
    row("mlp.gate_up_bias", "+ f", ("mlp.gate_proj.bias", "f"), ("mlp.up_proj.bias", "f")),
    row("mlp.down.weight", "f d", ("mlp.down_proj.weight", "d f")),
    row("mlp.down.bias", "d", ("mlp.down_proj.bias", "d")),
)
LLAMA_ROWS = (
    row("attention_norm.scale", "d", ("input_layernorm.weight", "d")),
    *_ATTENTION,
    row("mlp_norm.scale", "d", ("post_attention_layernorm.weight", "d")),
    *_MLP,
)
GEMMA2_ROWS = (
    row("attention_norm.scale", "d", ("input_layernorm.weight", "d")),
    *_ATTENTION,
    row("attention_post_norm.scale", "d", ("post_attention_layernorm.weight", "d")),
    row("mlp_norm.scale", "d", ("pre_feedforward_layernorm.weight", "d")),
    *_MLP,
    row("mlp_post_norm.scale", "d", ("post_feedforward_layernorm.weight", "d")),
)
GPT2_ROWS = (
    row("attention_norm.scale", "d", ("ln_1.weight", "d")),
    row("attention_norm.bias", "d", ("ln_1.bias", "d")),
    row("attention.qkv.linear.weight", "d (k + c)", ("attn.c_attn.weight", "d (+3 k c)")),
    row("attention.qkv.linear.bias", "(k + c)", ("attn.c_attn.bias", "(+3 k c)")),
    row("attention.out.weight", "(h c) d", ("attn.c_proj.weight", "(h c) d")),
    row("attention.out.bias", "d", ("attn.c_proj.bias", "d")),
    row("mlp_norm.scale", "d", ("ln_2.weight", "d")),
    row("mlp_norm.bias", "d", ("ln_2.bias", "d")),
    row("mlp.up.weight", "d f", ("mlp.c_fc.weight", "d f")),
    row("mlp.up.bias", "f", ("mlp.c_fc.bias", "f")),
    row("mlp.down.weight", "f d", ("mlp.c_proj.weight", "f d")),
    row("mlp.down.bias", "d", ("mlp.c_proj.bias", "d")),
)
EMBED = (row("table", "v d", ("embed_tokens.weight", "v d")),)
HEAD = (
    row("norm.scale", "d", ("norm.weight", "d")),
    row("table", "v d", (".lm_head.weight", "v d")),
)
GPT2_EMBED = (
    row("table", "v d", ("wte.weight", "v d")),
    row("positions", "p d", ("wpe.weight", "p d")),
)
GPT2_HEAD = (
    row("norm.scale", "d", ("ln_f.weight", "d")),
    row("norm.bias", "d", ("ln_f.bias", "d")),
    row("table", "v d", (".lm_head.weight", "v d")),
)

# ---- config.json -------------------------------------------------------------------------------

_KEYS = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
_GPT2_KEYS = {
    "vocab_size": "vocabulary",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
    "n_positions": "positions",
    "layer_norm_epsilon": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
# The kinds of values. JSON may have NaN and Infinity, and text in place of a number or flag.
_OF_KIND: dict[Kind, str] = {
    "size": "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim num_local_experts num_experts num_experts_per_tok moe_intermediate_size "
    "decoder_sparse_step n_routed_experts n_group topk_group q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size n_embd n_layer n_head n_inner "
    "n_positions max_position_embeddings "
    "sliding_window sliding_window_pattern _sliding_window_pattern",
    "count": "max_window_layers shared_expert_intermediate_size first_k_dense_replace "
    "n_shared_experts num_nextn_predict_layers",
    "positive": "rms_norm_eps layer_norm_epsilon rope_theta rope_local_base_freq "
    "query_pre_attn_scalar swiglu_limit routed_scaling_factor attn_logit_softcapping "
    "final_logit_softcapping partial_rotary_factor",
    "flag": "tie_word_embeddings norm_topk_prob attention_bias mlp_bias use_sliding_window",
    "text": "model_type topk_method hidden_act hidden_activation activation_function",
    "object": "rope_scaling rope_parameters",
    "list": "layer_types architectures mlp_only_layers",
}
_KINDS: dict[str, Kind] = {key: kind for kind, of in _OF_KIND.items() for key in of.split()}
_OF_ROPE: dict[Kind, str] = {
    "size": "original_max_position_embeddings",
    "positive": "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow "
    "attention_factor partial_rotary_factor",
    "number": "mscale mscale_all_dim",
    "flag": "truncate",
    "text": "rope_type type",
    "object": "full_attention sliding_attention",
}
_ROPE_KINDS: dict[str, Kind] = {key: kind for kind, of in _OF_ROPE.items() for key in of.split()}
_ROPE_VALUES = "rope_theta", "partial_rotary_factor", "low_freq_factor", "high_freq_factor"
# Keys that may be null: the model lacks the feature, or the value follows from others.
# A flag that is null is false; any other key that is null has no meaning, and is refused.
_NULLS = (
    "num_key_value_heads head_dim n_inner sliding_window layer_types mlp_only_layers "
    "rope_scaling rope_parameters attn_logit_softcapping final_logit_softcapping q_lora_rank "
    "num_local_experts num_experts n_routed_experts n_shared_experts num_nextn_predict_layers "
    "architectures"
)
_MAY_BE_NULL = {*_NULLS.split()}
_ACTIVATION_KEYS = "hidden_act", "hidden_activation", "activation_function"
_SIZES = {"vocabulary", "width", "layers", "heads"}  # these have no default
_HIDDEN_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


class _Given(dict[str, Any]):
    """The content of config.json; reading a key that is null or missing raises an error."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or the default if config.json lacks the key."""
        return self[key] if key in self else default  # noqa: SIM401 - it would call itself

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise ValueError(f"{key} is missing")
        if (value := super().__getitem__(key)) is None:
            raise ValueError(null_fault(key, _KINDS))
        return value


def _without_nulls(content: Config, defaults: Config, only: Config) -> dict[str, Any]:
    """Fill config.json with defaults; null flags become False, optional nulls are dropped."""
    flags = {key for key, kind in _KINDS.items() if kind == "flag"}
    flags |= {key for key, value in only.items() if isinstance(value, bool)}
    given = {**defaults, **content}
    if given.get("hidden_activation") is None:  # null in Gemma's first files
        given["hidden_activation"] = defaults.get("hidden_activation")
    given |= {key: False for key in flags | {"qkv_bias"} if given.get(key, False) is None}
    return {k: v for k, v in given.items() if v is not None or k not in _MAY_BE_NULL}


def read_config(
    content: Config,
    *,
    name: str,
    keys: Mapping[str, str],
    defaults: Config,
    only: Config,
    read: Callable[[Config], Mapping[str, Any]],
) -> DecoderConfig:
    """Return a decoder's configuration from the content of config.json.

    Args:
      keys: names of config.json and of the decoder.
      defaults: defaults of keys that config.json may lack, under its names; among them the MLP's
        activation.
      only: the only supported value of keys that may have other values in the family.
      read: a function from config.json to values that hold for the family, or depend on several
        keys.

    Raises:
      ValueError: a key is missing, or requires a feature that this decoder lacks.
    """
    given = _without_nulls(content, defaults, only)
    if given.get("use_sliding_window") is False and given.get("sliding_window") == 0:
        del given["sliding_window"]  # transformers writes 0 if it is not used
    wrong = _faults(given)
    for key, own in keys.items():
        if own in _SIZES and given.get(key) is None:
            wrong.append(f"{key} is missing")
        elif key in given and given[key] is None:
            wrong.append(null_fault(key, _KINDS))
    wrong += [
        f"{key}={shown(given[key])} is not supported, only {value!r}"
        for key, value in {**only, "quantization_config": None}.items()
        if given.get(key, value) != value
    ]
    activation_key = next(key for key in _ACTIVATION_KEYS if key in defaults)
    activation = given.get(activation_key)
    if str(activation) not in _HIDDEN_ACTIVATIONS:
        known = ", ".join(_HIDDEN_ACTIVATIONS)
        wrong.append(f"{activation_key}={shown(activation)} is not supported, only {known}")
    if wrong:
        raise ValueError(f"config.json of {name}: " + "; ".join(wrong))
    values = {own: given[key] for key, own in keys.items() if key in given}
    values["activation"] = _HIDDEN_ACTIVATIONS[str(activation)]
    values.setdefault("kv_heads", values["heads"])
    if "head_dim" not in values:
        values["head_dim"] = values["width"] // values["heads"]
    values.setdefault("hidden", 4 * values["width"])  # for GPT-2
    try:
        return DecoderConfig(**{**values, **read(_Given(given))})
    except ValueError as error:
        raise ValueError(f"config.json of {name}: {error}") from None


def _faults(given: Config) -> list[str]:
    """List the values that do not have the kind of their key, at any depth."""
    wrong = faults_of(given, _KINDS)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := given.get(key), Mapping):
            kinds = ("full_attention", "sliding_attention")
            nested = {f"{key}.{kind}.": rope.get(kind) for kind in kinds}
            for within, of in {f"{key}.": rope, **nested}.items():
                if isinstance(of, Mapping):
                    wrong += faults_of(of, _ROPE_KINDS, within)
                    nulls = [one for one in _ROPE_VALUES if one in of and of[one] is None]
                    wrong += [within + null_fault(one, _ROPE_KINDS) for one in nulls]
    return wrong


def _written_rope(given: Config, kind: str | None) -> dict[str, Any]:
    """Return the object of rotary positions, without keys that are null."""
    written: Mapping[str, Any] = given.get("rope_parameters") or {}
    if kind is not None and isinstance(written.get(kind), Mapping):
        written = written[kind]
    elif kind is None and "full_attention" in written:
        written = written["full_attention"]
    written = written or given.get("rope_scaling") or {}
    if written.get("truncate", True) is None:  # a flag that is null is false
        written = {**written, "truncate": False}
    return {key: value for key, value in written.items() if value is not None}


def _rope(given: Config, kind: str | None = None) -> Rope:
    """Return rotary positions from any form of the keys.

    Args:
      kind: the kind of layers, if each kind has its own rotary positions.
    """
    written = _written_rope(given, kind)

    def of_both(key: str, default: Any) -> Any:
        return written[key] if key in written else given.get(key, default)

    theta = of_both("rope_theta", 10000.0)
    how = written.get("rope_type", written.get("type", "default"))
    if of_both("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported, only 1.0")
    if how == "default":
        return Rope(theta)
    context: Any = written.get("original_max_position_embeddings")
    if context is None:
        context = given.get("max_position_embeddings", 8192)
    if how in ("linear", "llama3") and written.get("factor") is None:
        raise ValueError(f"rope of type {how!r} has no factor")
    if how == "linear":
        return Rope(theta, LinearScaling(written["factor"]))
    if how == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        values = {name: written[name] for name in names if name in written}
        return Rope(theta, RopeScaling(**values, original_max_position_embeddings=context))
    if how == "yarn":
        options = ("beta_fast", "beta_slow", "attention_factor", "truncate")
        values = {name: written[name] for name in options if name in written}
        factor = written.get("factor") or given.get("max_position_embeddings", context) / context
        both = [written.get(name) for name in ("mscale", "mscale_all_dim")]
        if all(both) and "attention_factor" not in values:
            first, second = (yarn_amplitude(factor, scale) for scale in both if scale)
            values["attention_factor"] = first / second
        return Rope(theta, YarnScaling(factor, context, **values))
    raise ValueError(
        f"rope of type {how!r} is not supported as written ({dict(written)!r}); known are "
        f"default, linear, llama3 and yarn"
    )


def _windows(given: Config, *, pattern: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return [layers] the window of each layer.

    Args:
      pattern: a function that tells which layers have a window, if there is no ``layer_types``.
    """
    layers, window = given["num_hidden_layers"], given.get("sliding_window")
    if window is None:
        return ()
    kinds = given.get("layer_types")
    if kinds is None:
        return tuple(window if pattern(n) else None for n in range(layers))
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _biased(given: Config, *, default: bool = False) -> dict[str, Any]:
    bias = given.get("attention_bias", default)
    return {"rope": _rope(given), "qkv_bias": bias, "out_bias": bias}


def _number(given: Config, key: str) -> int:
    """Read the number of experts, under any of the names in releases of transformers."""
    names = (key, "num_local_experts", "num_experts")
    number: int = given[next((name for name in names if name in given), key)]
    return number


def in_all_layers(given: Config, number: str, **options: Any) -> ExpertsConfig:
    """Return an `ExpertsConfig` with experts in every layer, their number read from a key."""
    sizes = _number(given, number), given["num_experts_per_tok"], given["intermediate_size"]
    return ExpertsConfig(*sizes, tuple(range(given["num_hidden_layers"])), **options)


def qwen(given: Config) -> ExpertsConfig:
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


def deepseek(given: Config, version: int) -> ExpertsConfig:
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


def latent(given: Config) -> LatentConfig:
    keys = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    return LatentConfig(given.get("q_lora_rank"), *(given[key] for key in keys))


def latent_scale(given: Config) -> float:
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


def _llama(given: Config) -> dict[str, Any]:
    return {**_biased(given), "mlp_bias": given.get("mlp_bias", False)}


def _mistral(given: Config) -> dict[str, Any]:
    return {"rope": _rope(given), "windows": _windows(given, pattern=lambda _: True)}


def _qwen2(given: Config) -> dict[str, Any]:
    windows: tuple[int | None, ...] = ()
    if given.get("use_sliding_window", False):
        first = given.get("max_window_layers", 28)
        windows = _windows(given, pattern=lambda n: n >= first)
    return {"rope": _rope(given), "windows": windows, "qkv_bias": True}


def _qwen3(given: Config) -> dict[str, Any]:
    return {**_qwen2(given), **_biased(given), "qk_norm": True}


def _gemma(given: Config) -> dict[str, Any]:
    scale = given["hidden_size"] ** 0.5
    return {**_biased(given), "embedding_scale": scale, "norm_offset": 1.0}


def _gemma2(given: Config) -> dict[str, Any]:
    return {
        **_gemma(given),
        "post_norms": True,
        "attention_scale": given["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": given.get("attn_logit_softcapping"),
        "logit_softcap": given.get("final_logit_softcapping"),
        "windows": _windows(given, pattern=lambda n: n % 2 == 0),
    }


def _gemma3(given: Config) -> dict[str, Any]:
    every = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", 6))
    windows = _windows(given, pattern=lambda n: (n + 1) % every != 0)
    if isinstance((given.get("rope_parameters") or {}).get("sliding_attention"), Mapping):
        local = _rope(given, "sliding_attention")
    else:
        local = Rope(given.get("rope_local_base_freq", 10000.0))
    return {**_gemma2(given), "windows": windows, "local_rope": local, "qk_norm": True}


def _gpt2(_: Config) -> dict[str, Any]:
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    return {"norm": "layer", "rope": None, "gated": False, **biases}


def _mixtral(given: Config) -> dict[str, Any]:
    return {**_mistral(given), "experts": in_all_layers(given, "num_local_experts")}


def _olmoe(given: Config) -> dict[str, Any]:
    renormalise = given.get("norm_topk_prob", False)
    mixture = in_all_layers(given, "num_experts", renormalise=renormalise)
    return {**_llama(given), "experts": mixture, "qk_norm": "whole"}


def _qwen2_moe(given: Config) -> dict[str, Any]:
    bias = given.get("qkv_bias", True)
    return {"rope": _rope(given), "qkv_bias": bias, "experts": qwen(given)}


def _qwen3_moe(given: Config) -> dict[str, Any]:
    used = given.get("use_sliding_window", False)
    windows = _windows(given, pattern=lambda _: True) if used else ()
    own = {"windows": windows, "experts": qwen(given), "qk_norm": True}
    return {**_biased(given), **own}


def _gpt_oss(given: Config) -> dict[str, Any]:
    windows = _windows(given, pattern=lambda n: n % 2 == 0)
    how = {"scoring": "topk_softmax", "router_bias": True, "bias": True}
    limit = given.get("swiglu_limit", 7.0)
    mixture = in_all_layers(given, "num_local_experts", clamp=limit, **how)
    return {**_biased(given, default=True), "windows": windows, "experts": mixture, "sinks": True}


def _deepseek(given: Config, version: int) -> dict[str, Any]:
    sizes = latent(given)
    return {
        "rope": _rope(given),
        "latent": sizes,
        "attention_scale": latent_scale(given),
        "head_dim": sizes.rope,
        "kv_heads": given["num_attention_heads"],
        "experts": deepseek(given, version),
    }


# ---- the families --------------------------------------------------------------------------------

_DEEPSEEK_ROWS = (
    row("attention_norm.scale", "d", ("input_layernorm.weight", "d")),
    *LATENT_ROWS,
    row("mlp_norm.scale", "d", ("post_attention_layernorm.weight", "d")),
    *_MLP,
    *DEEPSEEK_ROWS,
)
_DEEPSEEK_MTP = (
    row("main_norm.scale", "d", ("..norm.weight", "d")),
    row("embed_norm.scale", "d", ("enorm.weight", "d")),
    row("hidden_norm.scale", "d", ("hnorm.weight", "d")),
    row("join", "u d", ("eh_proj.weight", "d u")),
    row("norm.scale", "d", ("shared_head.norm.weight", "d")),
)
_HEAD_NORMS = {"attention.q_norm.scale", "attention.k_norm.scale"}
_OLMOE_ROWS = (
    *(one for one in LLAMA_ROWS if one.target not in _HEAD_NORMS),
    *OLMOE_NORMS,
    *EXPERT_ROWS,
)
_BUFFERS = r"\.rotary_emb\.inv_freq$"
_TABLE: dict[str, Any] = {"rows": LLAMA_ROWS, "embed": EMBED, "head": HEAD, "ignored": (_BUFFERS,)}
_SILU = {"hidden_act": "silu"}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GPT2_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "tie_word_embeddings": True,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": _GPT_OSS_ROPE,
    "sliding_window": 128,
}
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
_ANY: Config = {}


def _family(
    name: str,
    read: Callable[[Config], Mapping[str, Any]],
    defaults: Config = _ANY,
    only: Config = _ANY,
    keys: Mapping[str, str] = _KEYS,
    **table: Any,
) -> Family:
    """Make a family; `read_config` and `Family` explain the arguments."""
    if not any(key in defaults for key in _ACTIVATION_KEYS):
        defaults = {**_SILU, **defaults}
    how: dict[str, Any] = {"keys": keys, "defaults": defaults, "only": only, "read": read}
    config = functools.partial(read_config, name=name, **how)
    return Family(name, config=config, **{**_TABLE, **table})


_ALL = (
    _family("llama", _llama),
    _family("mistral", _mistral, {"sliding_window": 4096}),
    _family("qwen2", _qwen2),
    _family("qwen3", _qwen3, {"head_dim": 128}),
    _family("gemma", _gemma, _GEMMA),
    _family(
        "gemma2",
        _gemma2,
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        rows=GEMMA2_ROWS,
    ),
    _family(
        "gemma3_text",
        _gemma3,
        {**_GEMMA, "rope_theta": 1_000_000.0},
        {"use_bidirectional_attention": False},
        rows=GEMMA2_ROWS,
    ),
    _family(
        "gpt2",
        _gpt2,
        _GPT2_DEFAULTS,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        _GPT2_KEYS,
        rows=GPT2_ROWS,
        embed=GPT2_EMBED,
        head=GPT2_HEAD,
        blocks="h.{n}.",
        prefixes=("transformer.", ""),
        ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
    ),
    _family("mixtral", _mixtral, {"rope_theta": 1e6}, rows=(*LLAMA_ROWS, *MIXTRAL_ROWS)),
    _family("olmoe", _olmoe, {"rms_norm_eps": 1e-5}, {"clip_qkv": None}, rows=_OLMOE_ROWS),
    _family(
        "qwen2_moe",
        _qwen2_moe,
        only={"use_sliding_window": False},
        rows=(*LLAMA_ROWS, *QWEN2_ROWS),
    ),
    _family("qwen3_moe", _qwen3_moe, {"head_dim": 128}, rows=(*LLAMA_ROWS, *EXPERT_ROWS)),
    _family(
        "gpt_oss",
        _gpt_oss,
        _GPT_OSS,
        {"swiglu_alpha": 1.702},
        rows=(*LLAMA_ROWS, *GPT_OSS_ROWS),
    ),
    _family(
        "deepseek_v2",
        functools.partial(_deepseek, version=2),
        only={**_DEEPSEEK, "norm_topk_prob": False, "scoring_func": "softmax"},
        rows=_DEEPSEEK_ROWS,
    ),
    _family(
        "deepseek_v3",
        functools.partial(_deepseek, version=3),
        only={**_DEEPSEEK, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        keys={**_KEYS, "num_nextn_predict_layers": "mtp_layers"},
        rows=_DEEPSEEK_ROWS,
        mtp=_DEEPSEEK_MTP,
        mtp_copies=(("embed_tokens.weight", "embed"), ("shared_head.head.weight", "head")),
        # The published layer for multi-token prediction, if config.json does not count it.
        ignored=(_BUFFERS, r"^model\.layers\.61\."),
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of(content: Config, where: str = "config.json") -> Family:
    """Return the family of a config.json, by its ``model_type``."""
    name = content.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    known = ", ".join(FAMILIES)
    if name is None:
        raise ValueError(f"{where} has no model_type; known are {known}")
    made = content.get("architectures")
    also = f" (architectures {', '.join(map(str, made))})" if isinstance(made, list) else ""
    raise ValueError(
        f"{where} has model_type {shown(name)}{also}, and known are {known}; for another give "
        f"family=, a pipeline.weights.Family with a table of its names"
    )
