"""A layer of a decoder: attention, and an MLP or a mixture of experts.

Letters: b = sequences, t = positions, d = width.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from pipeline.base.agreed.slices import SequenceSlice
from pipeline.models.decoders.attention import DecoderAttention
from pipeline.models.decoders.config import ACTIVATIONS, DecoderConfig
from pipeline.models.decoders.experts import make_experts
from pipeline.models.decoders.latent import LatentAttention
from pipeline.models.decoders.norms import make_norm
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.layers.linear import ColumnLinear, RowLinear
from pipeline.models.layers.mlp import SwiGLU


class PlainMLP(nnx.Module):
    """`[..., d] -> [..., d]`: down(activation(up(x))).

    Args:
      config: the configuration of the decoder.
      rngs: has a stream ``params``.
      dtype: the dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, dtype: Any) -> None:
        d, f = config.width, config.hidden
        self.activation = ACTIVATIONS[config.activation]
        self.up = ColumnLinear(d, f, rngs, bias=config.mlp_bias, dtype=dtype)
        self.down = RowLinear(f, d, rngs, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the whole output."""
        return self.down(self.activation(self.up(x)))


class Block(nnx.Module):
    """Attention and MLP, each added to the residual stream: `[b, t, d] -> [b, t, d]`.

    Args:
      config: the configuration of the decoder.
      layer: the number of this layer.
      rngs: has a stream ``params``.
      dtype: the dtype of the parameters; activations: the dtype of activations, by default that of
        the parameters.
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
        types: dict[str, Any] = {"dtype": dtype, "activations": activations, "context": context}
        kind = DecoderAttention if config.latent is None else LatentAttention
        self.attention: Any = kind(config, layer, rngs, **types)
        self.mlp_norm = make_norm(config, dtype)
        experts, activation = config.experts, ACTIVATIONS[config.activation]
        if experts is not None and layer in experts.layers:
            self.experts = make_experts(experts, config.width, activation, rngs, dtype=dtype)
        elif config.gated:
            more: dict[str, Any] = {"bias": config.mlp_bias, "activation": activation}
            self.mlp: Any = SwiGLU(config.width, config.hidden, rngs, dtype=dtype, **more)
        else:
            self.mlp = PlainMLP(config, rngs, dtype=dtype)
        after = config.post_norms
        self.attention_post_norm = make_norm(config, dtype) if after else None
        self.mlp_post_norm = make_norm(config, dtype) if after else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Run the block; positions and segments are those of `DecoderAttention`."""
        x = self._attended(x, self.attention(self.attention_norm(x), positions, segments))
        return self._added(
            x, (self.experts if hasattr(self, "experts") else self.mlp)(self.mlp_norm(x))
        )

    def call_slice(
        self,
        x: jax.Array,
        earlier: Any,
        part: SequenceSlice,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Run the block on one slice of a sequence, as `DecoderAttention.call_slice`."""
        of_attention, of_experts = earlier or (None, None)
        given = self.attention_norm(x), of_attention, part, positions, segments
        y, own = self.attention.call_slice(*given)
        x = self._attended(x, y)
        if not hasattr(self, "experts"):
            return self._added(x, self.mlp(self.mlp_norm(x))), (own, ())
        y, counts = self.experts.call_slice(self.mlp_norm(x), of_experts, part)
        return self._added(x, y), (own, counts)

    def _attended(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Add the result of attention to the residual stream."""
        return x + (y if self.attention_post_norm is None else self.attention_post_norm(y))

    def _added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Add the result of the MLP, or of the experts, to the residual stream."""
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
