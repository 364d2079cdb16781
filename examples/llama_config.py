"""The sizes of a Llama-family model, as published or as a Hugging Face configuration has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pipeline.layers import RopeScaling
from pipeline.models.layers.kernels import OPERANDS, RESIDUALS

REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
# What would change the model if it were passed over: the value that means "as here".
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder: RMSNorm, rotary positions, grouped queries, SwiGLU; no biases.

    The first ten names are those of the Hugging Face configuration.

    Attributes:
      hidden_size: d.
      num_hidden_layers: blocks.
      num_attention_heads: heads of queries; num_key_value_heads: of keys and values.
      intermediate_size: hidden columns of the MLP.
      vocab_size: words.
      head_dim: width of a head; by default d over the heads of queries.
      rope_theta, rope_scaling: of the rotary positions.
      rms_norm_eps: of the norms.
      tie_word_embeddings: whether embedding and head share their table.
      dtype, param_dtype: of activations and of parameters.
      sequence_parallel: whether activations between blocks are cut along the sequence.
      vocabulary_multiple_of: what the table's rows are padded to.
      loss_chunks: parts in which a rank forms its logits, none of which is kept; None keeps them.
      replicate_kv: whether every tensor rank has all heads of keys and values, of which there may
        then be fewer than ranks.
      attention: the `implementation` of `pipeline.layers.Attention`; None takes that of the
        platform.
      query_chunk: without a kernel, queries whose scores are formed at a time; None for as many
        as make 2^20 scores of a head.
      scan_layers: whether a stage's blocks are one block over stacked weights, compiled once.
      remat_blocks: whether each block is computed again in its backward.
      keep_attention: whether that spares splash attention, whose results are then kept.
      keep_projections: whether queries, keys and values of splash attention are kept too.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int | None = None
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    sequence_parallel: bool = False
    vocabulary_multiple_of: int = 1
    loss_chunks: int | None = None
    attention: str | None = None
    query_chunk: int | None = None
    replicate_kv: bool = False
    scan_layers: bool = False
    remat_blocks: bool = False
    keep_attention: bool = False
    keep_projections: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
          ValueError: all that is wrong, at once.
        """
        if wrong := _wrong(self):
            raise ValueError("LlamaConfig: " + "; ".join(wrong))

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the activations within a block that are not computed again."""
        names = {RESIDUALS: self.keep_attention, OPERANDS: self.keep_projections}
        return tuple(name for name, is_kept in names.items() if is_kept)

    @property
    def width_of_head(self) -> int:
        """The width of a head, given or not."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def count(self) -> int:
        """Parameters, without padding."""
        d, c = self.hidden_size, self.width_of_head
        attention = 2 * d * c * (self.num_attention_heads + self.num_key_value_heads)
        block = attention + 3 * d * self.intermediate_size + 2 * d
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * block + tables * self.vocab_size * d + d

    @classmethod
    def llama_8b(cls, **changes: Any) -> LlamaConfig:
        """Llama 3, 8.03e9 parameters."""
        return replace(cls(4096, 32, 32, 8, 14336, 128256), **changes)

    @classmethod
    def llama_70b(cls, **changes: Any) -> LlamaConfig:
        """Llama 3, 70.6e9 parameters."""
        return replace(cls(8192, 80, 64, 8, 28672, 128256), **changes)

    @classmethod
    def tiny(cls, **changes: Any) -> LlamaConfig:
        """For tests: 4 blocks, 8 heads in 4 groups."""
        return replace(cls(32, 4, 8, 4, 48, 64, rope_theta=100.0), **changes)

    @classmethod
    def from_json(cls, path: str | Path, **changes: Any) -> LlamaConfig:
        """Read a ``config.json``; otherwise as `from_dict`."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        return cls.from_dict(content, **changes)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], **changes: Any) -> LlamaConfig:
        """From the usual keys; those that say nothing about the model's function are passed over.

        Args:
          content: a Hugging Face configuration.
          changes: any attributes, which win over it.

        Raises:
          ValueError: a key is missing, or asks for what this model does not have.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"a configuration is a JSON object, not {type(content).__name__}")
        content = {**content, **_rope(content)}
        wrong = [f"{key} is missing" for key in REQUIRED if key not in content]
        wrong += [
            f"{key}={content[key]!r} is not supported, only {only!r}"
            for key, only in FIXED.items()
            if content.get(key, only) != only
        ]
        if wrong:
            raise ValueError("LlamaConfig.from_dict: " + "; ".join(wrong))
        names = {field.name for field in fields(cls)} - {"dtype", "param_dtype"}
        # Defaults of that format, where they differ from ours.
        usual = {
            "num_key_value_heads": content["num_attention_heads"],
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
        }
        found = {name: content[name] for name in names if name in content}
        return cls(**{**usual, **found, **changes})


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, out of either form in which they are written."""
    written = content.get("rope_parameters") or content.get("rope_scaling") or {}
    found = {"rope_theta": written["rope_theta"]} if "rope_theta" in written else {}
    kind = written.get("rope_type", written.get("type", "default"))
    if kind == "default":
        return {**found, "rope_scaling": None}
    if kind != "llama3":
        raise ValueError(
            f"LlamaConfig.from_dict: rope_scaling of type {kind!r} is not supported, only "
            f"'llama3' and 'default'"
        )
    names = [field.name for field in fields(RopeScaling)]
    scaling = RopeScaling(**{name: written[name] for name in names if name in written})
    return {**found, "rope_scaling": scaling}


def _wrong(config: LlamaConfig) -> list[str]:
    """Everything that cannot be."""
    sizes = (*REQUIRED, "num_key_value_heads", "vocabulary_multiple_of")
    optional = ("head_dim", "loss_chunks", "query_chunk")
    given = [*sizes, *(name for name in optional if getattr(config, name) is not None)]
    wrong = [
        f"{name}={getattr(config, name)!r} must be an integer >= 1"
        for name in given
        if not _is_size(getattr(config, name))
    ]
    if wrong:
        return wrong
    d, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if heads % kv:
        wrong.append(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv}")
    if config.head_dim is None and d % heads:
        wrong.append(
            f"hidden_size={d} is no multiple of num_attention_heads={heads}: give head_dim"
        )
    elif config.width_of_head % 2:
        wrong.append(f"head_dim={config.width_of_head} is odd: rotary positions turn pairs")
    wrong += [
        f"{name}={getattr(config, name)!r} must be the name of a float type, such as 'bfloat16'"
        for name in ("dtype", "param_dtype")
        if not _is_float(getattr(config, name))
    ]
    return wrong


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_float(name: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:
        return False
