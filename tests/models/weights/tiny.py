"""Tiny random checkpoints, and the same models in NumPy by the names of their files.

Written from the definitions of the models, so that neither a table of names nor a layer of ours is
asked what a tensor means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS, T = 40, 9
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WIDE = {**LLAMA, "head_dim": 8}
GEMMA = {**WIDE, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
WINDOWED = {**GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 10}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA,
        "model_type": "llama",
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 4},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**WIDE, "model_type": "qwen3", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "gemma": {**GEMMA, "model_type": "gemma"},
    "gemma2": {**WINDOWED, "model_type": "gemma2", "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        **WINDOWED,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": WORDS,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
    },
}
Tensors = dict[str, np.ndarray]


def tensors_of(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> Tensors:
    """Random tensors under the names that the family's checkpoints have."""
    rng, name = np.random.default_rng(seed), config["model_type"]
    found: Tensors = {}

    def put(name: str, *shape: int, scale: float = 0.3) -> None:
        found[name] = (scale * rng.normal(size=shape)).astype(dtype)

    if name == "gpt2":
        _put_gpt2(config, put)
        return found
    d, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    c = config.get("head_dim", d // heads)
    put("model.embed_tokens.weight", WORDS, d)
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if name in ("gemma2", "gemma3_text"):
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            put(f"{layer}{norm}.weight", d, scale=1)
        for part, rows in (("q", heads * c), ("k", kv * c), ("v", kv * c)):
            put(f"{layer}self_attn.{part}_proj.weight", rows, d)
            if name == "qwen2":
                put(f"{layer}self_attn.{part}_proj.bias", rows)
        put(f"{layer}self_attn.o_proj.weight", d, heads * c)
        if name in ("qwen3", "gemma3_text"):
            put(f"{layer}self_attn.q_norm.weight", c, scale=1)
            put(f"{layer}self_attn.k_norm.weight", c, scale=1)
        put(f"{layer}mlp.gate_proj.weight", f, d)
        put(f"{layer}mlp.up_proj.weight", f, d)
        put(f"{layer}mlp.down_proj.weight", d, f)
    put("model.norm.weight", d, scale=1)
    if not config["tie_word_embeddings"]:
        put("lm_head.weight", WORDS, d)
    return found


def _put_gpt2(config: dict[str, Any], put: Any) -> None:
    d, f, blocks = config["n_embd"], 4 * config["n_embd"], config["n_layer"]
    put("transformer.wte.weight", WORDS, d)
    put("transformer.wpe.weight", config["n_positions"], d)
    for n in range(blocks):
        h = f"transformer.h.{n}."
        for norm in ("ln_1", "ln_2"):
            put(f"{h}{norm}.weight", d, scale=1)
            put(f"{h}{norm}.bias", d)
        for layer, rows, columns in (
            ("attn.c_attn", d, 3 * d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, f),
            ("mlp.c_proj", f, d),
        ):
            put(f"{h}{layer}.weight", rows, columns)
            put(f"{h}{layer}.bias", columns)
    put("transformer.ln_f.weight", d, scale=1)
    put("transformer.ln_f.bias", d)


def write(
    folder: Path, config: dict[str, Any], tensors: Tensors, *, files: int = 1, dtype: str = "F32"
) -> Path:
    """A checkpoint, by the definition of its format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if files == 1:
        write_file(folder / "model.safetensors", tensors, dtype)
        return folder
    places = {}
    for n in range(files):
        file = f"model-{n + 1:05d}-of-{files:05d}.safetensors"
        own = names[n::files]
        write_file(folder / file, {name: tensors[name] for name in own}, dtype)
        places |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_file(path: Path, tensors: Tensors, dtype: str = "F32") -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        spans = [at, at + x.nbytes]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": spans}
        at += x.nbytes
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(folder: Path) -> Tensors:
    """All tensors of a folder, by the format's own library."""
    from safetensors.numpy import load_file

    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


# ---- the models in NumPy -----------------------------------------------------------------------


def logits(config: dict[str, Any], w: Tensors, tokens: np.ndarray) -> np.ndarray:
    """[b, t] words to [b, t, v] logits, in float64."""
    w = {name: x.astype(np.float64) for name, x in w.items()}
    if config["model_type"] == "gpt2":
        return _gpt2(config, w, tokens)
    name, d, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    gemma, sandwich = name.startswith("gemma"), name in ("gemma2", "gemma3_text")
    c, kv = config.get("head_dim", d // heads), config["num_key_value_heads"]
    eps = config["rms_norm_eps"]

    def norm(x: np.ndarray, at: str) -> np.ndarray:
        scale = w[at] + gemma
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

    table = w["model.embed_tokens.weight"]
    x = table[tokens] * (d**0.5 if gemma else 1)
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."

        def project(y: np.ndarray, part: str, at: str = at) -> np.ndarray:
            y = y @ w[f"{at}{part}.weight"].T
            return y + w.get(f"{at}{part}.bias", 0)

        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (project(y, f"self_attn.{part}_proj") for part in "qkv")
        q = q.reshape(*q.shape[:2], heads, c)
        k, v = (z.reshape(*z.shape[:2], kv, c) for z in (k, v))
        if f"{at}self_attn.q_norm.weight" in w:
            q = norm(q, f"{at}self_attn.q_norm.weight")
            k = norm(k, f"{at}self_attn.k_norm.weight")
        window = config.get("sliding_window")
        local = {"gemma2": n % 2 == 0, "gemma3_text": n % 3 != 2}.get(name, True)
        q, k = (_turn(config, z, local=local and name == "gemma3_text") for z in (q, k))
        scale = config.get("query_pre_attn_scalar", c) ** -0.5
        cap = {"gemma2": config.get("attn_logit_softcapping")}.get(name)
        y = _attend(q, k, v, scale, window if local else None, cap)
        y = project(y, "self_attn.o_proj")
        after = f"{at}post_attention_layernorm.weight"
        x = x + (norm(y, after) if sandwich else y)
        y = norm(x, f"{at}pre_feedforward_layernorm.weight" if sandwich else after)
        gate = _gelu if gemma else _silu
        y = project(gate(project(y, "mlp.gate_proj")) * project(y, "mlp.up_proj"), "mlp.down_proj")
        x = x + (norm(y, f"{at}post_feedforward_layernorm.weight") if sandwich else y)
    x = norm(x, "model.norm.weight") @ w.get("lm_head.weight", table).T
    return 30 * np.tanh(x / 30) if name == "gemma2" else x


def _gpt2(config: dict[str, Any], w: Tensors, tokens: np.ndarray) -> np.ndarray:
    def norm(x: np.ndarray, at: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        unit = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return unit * w[f"{at}.weight"] + w[f"{at}.bias"]

    def conv(x: np.ndarray, at: str) -> np.ndarray:
        return x @ w[f"{at}.weight"] + w[f"{at}.bias"]

    heads, table = config["n_head"], w["transformer.wte.weight"]
    x = table[tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for n in range(config["n_layer"]):
        at = f"transformer.h.{n}."
        q, k, v = np.split(conv(norm(x, f"{at}ln_1"), f"{at}attn.c_attn"), 3, axis=-1)
        q, k, v = (z.reshape(*z.shape[:2], heads, -1) for z in (q, k, v))
        y = _attend(q, k, v, q.shape[-1] ** -0.5, None, None)
        x = x + conv(y, f"{at}attn.c_proj")
        y = _gelu(conv(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc"))
        x = x + conv(y, f"{at}mlp.c_proj")
    return norm(x, "transformer.ln_f") @ table.T


def _turn(config: dict[str, Any], x: np.ndarray, *, local: bool) -> np.ndarray:
    """Rotary positions, of pairs (i, i + c / 2)."""
    c = x.shape[-1]
    gemma3 = config["model_type"] == "gemma3_text"
    theta = config.get("rope_theta", 1e6 if gemma3 and not local else 10000.0)
    steps = theta ** (-np.arange(0, c, 2) / c)
    scaling = {} if local else config.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        steps = steps / scaling["factor"]
    if kind == "llama3":
        long, low, high = (scaling["original_max_position_embeddings"], 1.0, 4.0)
        kept = np.clip((long * steps / (2 * np.pi) - low) / (high - low), 0, 1)
        steps = kept * steps + (1 - kept) * steps / scaling["factor"]
    angles = np.arange(x.shape[1])[:, None, None] * steps
    a, b = x[..., : c // 2], x[..., c // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None,
    cap: float | None,
) -> np.ndarray:
    k, v = (np.repeat(z, q.shape[2] // z.shape[2], axis=2) for z in (k, v))
    scores = np.einsum("bthc,bshc->bhts", q, k) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    t = q.shape[1]
    back = np.arange(t)[:, None] - np.arange(t)
    seen = (back >= 0) & (back < (window or t))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshc->bthc", weights, v).reshape(*q.shape[:2], -1)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
