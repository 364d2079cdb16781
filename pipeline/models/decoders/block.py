"""A layer of a decoder: attention, and an MLP or a mixture of experts.

Letters: b = sequences, t = positions, d = width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.agreed.slices import SequenceSlice
from pipeline.models.decoders.attention import DecoderAttention, LatentAttention, Types
from pipeline.models.decoders.config import ACTIVATIONS, DecoderConfig
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.layers.experts.options import RoutingOptions
from pipeline.models.layers.linear import ColumnLinear, RowLinear
from pipeline.models.layers.mixture import MixtureOfExperts
from pipeline.models.layers.mlp import SwiGLU
from pipeline.models.layers.norm import LayerNorm, RMSNorm

SLOPE = 1.702  # the factor in the sigmoid of gpt-oss's gate


def make_norm(config: DecoderConfig, dtype: Any) -> RMSNorm | LayerNorm:
    """Make a norm over the width, with a scale of a dtype."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": dtype}
    if config.norm == "layer":
        return LayerNorm(config.width, **options)
    return RMSNorm(config.width, offset=config.norm_offset, **options)


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1)·gate·sigmoid(1.702·gate), with both gate and up clamped (gpt-oss).

    Attributes:
      limit: the largest gate, and the largest absolute up.
    """

    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = jnp.asarray(self.limit, gate.dtype)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * jnp.asarray(SLOPE, gate.dtype))


@dataclass(frozen=True)
class ActivatedGate:
    """The product activation(gate)·up.

    Attributes:
      activation: a function of one array.
    """

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate) * up


def make_experts(config: DecoderConfig, rngs: nnx.Rngs, dtype: Any) -> MixtureOfExperts:
    experts = config.experts
    assert experts is not None  # noqa: S101 - the block made sure of it
    gate: Any = ActivatedGate(ACTIVATIONS[config.activation])
    if experts.clamp is not None:
        gate = ClampedGate(experts.clamp)
    options = {field.name: getattr(experts, field.name) for field in fields(RoutingOptions)}
    options["bias_rate"] = experts.bias_rate if experts.selection_bias else None
    sizes = config.width, experts.hidden, experts.number, experts.top_k
    return MixtureOfExperts(*sizes, rngs, gate=gate, dtype=dtype, **options)


class PlainMLP(nnx.Module):
    """`[..., d] -> [..., d]`: down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, dtype: Any) -> None:
        d, f = config.width, config.hidden
        self.activation = ACTIVATIONS[config.activation]
        self.up = ColumnLinear(d, f, rngs, bias=config.mlp_bias, dtype=dtype)
        self.down = RowLinear(f, d, rngs, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream: `[b, t, d] -> [b, t, d]`.

    Args:
      config: the configuration of the decoder.
      layer: the number of this layer.
      rngs: has a stream ``params``.
      dtype: the dtype of the parameters; activations: the dtype of activations, by default the
        parameters' dtype.
      context: the split of sequences over the ranks of an axis.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        rngs: nnx.Rngs,
        *,
        dtype: Any,
        activations: Any = None,
        context: Context = WHOLE,
    ) -> None:
        self.attention_norm = make_norm(config, dtype)
        kind = DecoderAttention if config.latent is None else LatentAttention
        self.attention: Any = kind(config, layer, rngs, Types(dtype, activations, context))
        self.mlp_norm = make_norm(config, dtype)
        if config.experts is not None and layer in config.experts.layers:
            self.experts = make_experts(config, rngs, dtype)
        elif config.gated:
            more: dict[str, Any] = {"bias": config.mlp_bias, "dtype": dtype}
            more["activation"] = ACTIVATIONS[config.activation]
            self.mlp: Any = SwiGLU(config.width, config.hidden, rngs, **more)
        else:
            self.mlp = PlainMLP(config, rngs, dtype=dtype)
        after = config.post_norms
        self.attention_post_norm = make_norm(config, dtype) if after else None
        self.mlp_post_norm = make_norm(config, dtype) if after else None

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Run the block; `CachedAttention` explains positions and segments."""
        x = self._add_attention(x, self.attention(self.attention_norm(x), positions, segments))
        mlp = self.experts if hasattr(self, "experts") else self.mlp
        return self._add_mlp(x, mlp(self.mlp_norm(x)))

    def call_slice(
        self,
        x: jax.Array,
        earlier: Any,
        part: SequenceSlice,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Run the block on one slice of a sequence, as `CachedAttention.call_slice`."""
        keys, counts = earlier or (None, None)
        normed = self.attention_norm(x)
        y, keys = self.attention.call_slice(normed, keys, part, positions, segments)
        x = self._add_attention(x, y)
        if not hasattr(self, "experts"):
            return self._add_mlp(x, self.mlp(self.mlp_norm(x))), (keys, ())
        y, counts = self.experts.call_slice(self.mlp_norm(x), counts, part)
        return self._add_mlp(x, y), (keys, counts)

    def _add_attention(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + (y if self.attention_post_norm is None else self.attention_post_norm(y))

    def _add_mlp(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
