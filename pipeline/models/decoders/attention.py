"""Causal attention of decoders, with normed queries and keys, windows, soft caps and biases.

Letters are those of `pipeline.models.layers.attention`: b = sequences, t = positions, d = width, c
= width
of a head, k = heads of keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.places.sizes import TENSOR
from collectives.tensor import group_size, is_manual
from pipeline.base.agreed.slices import WHOLE_SEQUENCE, SequenceSlice
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.layers.attend import attend, attend_to
from pipeline.models.layers.attending.formula import Rule
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.layers.attention import FusedQKV
from pipeline.models.layers.linear import RowLinear
from pipeline.models.layers.norm import RMSNorm
from pipeline.models.layers.rotary import rotary, rotate
from pipeline.models.layers.weights import check_cut, make_weight


class DecoderAttention(nnx.Module):
    """Causal attention, `[b, t, d] -> [b, t, d]`: each position reads itself and earlier ones.

    Args:
      config: the configuration of the decoder.
      layer: the number of this layer.
      rngs: has a stream ``params``.
      dtype: the dtype of the parameters; activations: the dtype of cached keys and values, by
        default that of the parameters.
      context: the split of sequences over the ranks of an axis.
    """

    prefills = True

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
        self.context = context
        c, heads, self.kv_heads = config.head_dim, config.heads, config.kv_heads
        self.kept_dtype = jnp.dtype(dtype if activations is None else activations)
        self.qkv = FusedQKV(
            config.width, heads, config.kv_heads, c, rngs, bias=config.qkv_bias, dtype=dtype
        )
        pieces = "num_kv_heads", config.kv_heads, None
        more: dict[str, Any] = {"bias": config.out_bias, "dtype": dtype, "pieces": pieces}
        self.out = RowLinear(heads * c, config.width, rngs, **more)
        # Each rank norms its own heads, so the gradients of its scales are parts of sums over
        # ranks.
        norm: dict[str, Any] = {
            "epsilon": config.norm_epsilon,
            "offset": config.norm_offset,
            "sequence_parallel": True,
            "dtype": dtype,
        }
        self.q_norm: Any = RMSNorm(c, **norm) if config.qk_norm is True else None
        self.k_norm: Any = RMSNorm(c, **norm) if config.qk_norm is True else None
        if config.qk_norm == "whole":
            self.q_norm, self.k_norm = (
                nnx.data(HeadsNorm(config, number, dtype)) for number in (heads, config.kv_heads)
            )
        zeros = jax.nn.initializers.zeros
        self.sinks = _per_head(config, rngs, heads, zeros, dtype) if config.sinks else None
        self.rope, kind = config.rope_of(layer), (config.window(layer), config.attention_softcap)
        self.rule = Rule(*kind, config.attention_scale, context=context)

    def start_decoding(self, rows: int, length: int) -> None:
        """Allocate caches of keys and values for a number of sequences and positions."""
        # Within a stage, a rank of the axis keeps the keys and values of its own heads.
        heads = self.kv_heads // group_size(self.qkv.linear.axis)
        shape = rows, length, heads, self.qkv.head_dim
        self.keys = nnx.Cache(jnp.zeros(shape, self.kept_dtype))
        self.values = nnx.Cache(jnp.zeros(shape, self.kept_dtype))
        self.seen = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Attend; after `start_decoding` also to cached keys and values.

        Args:
          x: `[b, t, d]`; with caches, the positions after the cached positions.
          positions: `[b, t]`, by default 0..t-1, or the positions after the cached ones. They
            rotate queries and keys; the causal mask depends on the place in the sequence.
          segments: `[b, t]` integers, the document of each position (`layers.Attention`).

        Raises:
          ValueError: segments with caches, where a row is one document.
        """
        if not hasattr(self, "seen"):
            return self.call_slice(x, None, WHOLE_SEQUENCE, positions, segments)[0]
        first = self.seen[...]
        check_not_remembered(first, segments)
        y = self._remember(*self._turned(x, positions, first), first)
        return self.out(y.reshape(*y.shape[:2], -1))

    def call_slice(
        self,
        x: jax.Array,
        earlier: Any,
        part: SequenceSlice,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend from one slice of a sequence, as `pipeline.layers.Attention.call_slice`."""
        if positions is None and self.rope is not None:
            positions = self.context.places_in(part, x.shape[1])[None]
        q, k, v = self._turned(x, positions, 0)
        sinks = self._own_sinks()
        y, own = attend(self.rule, q, k, v, earlier, part, segments=segments, sinks=sinks)
        return self.out(y.reshape(*y.shape[:2], -1)), own

    def _turned(
        self, x: jax.Array, positions: jax.Array | None, first: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values; by default positions begin at ``first``."""
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = self.context.places(q.shape[1])[None] + first
            turns = rotary(positions, q.shape[-1], theta=self.rope.theta, scaling=self.rope.scaling)
            q, k = rotate(q, *turns), rotate(k, *turns)
        return q, k, v

    def _remember(self, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
        """Attend to these positions and to the cached earlier positions."""
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[...] = jax.lax.dynamic_update_slice_in_dim(
                cache[...], new.astype(self.kept_dtype), first, 1
            )
        t = q.shape[1]
        self.seen[...] = first + t
        return attend_to(
            replace(self.rule, implementation="chunked"),
            q,
            self.keys[...],
            self.values[...],
            places=first + jnp.arange(t),
            sinks=self._own_sinks(),
        )

    def _own_sinks(self) -> jax.Array | None:
        """Return the sinks of this rank's heads."""
        if self.sinks is None:
            return None
        check_cut(self.sinks, TENSOR)
        return self.sinks[...]


class HeadsNorm(nnx.Module):
    """`[b, t, h, c] -> [b, t, h, c]`: the root-mean-square norm of all heads together (OLMoE).

    Args:
      config: the configuration of the decoder.
      heads: h.
      dtype: the dtype of the scale.
    """

    def __init__(self, config: DecoderConfig, heads: int, dtype: Any) -> None:
        self.epsilon = config.norm_epsilon
        numbers = heads * config.head_dim
        self.scale = _per_head(config, nnx.Rngs(0), numbers, jax.nn.initializers.ones, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise, in the dtype of the input."""
        check_cut(self.scale, TENSOR)
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
        if is_manual(TENSOR):  # each rank has some of the heads
            square = jax.lax.pmean(square, TENSOR)
        scale = self.scale[...].astype(jnp.float32).reshape(1, 1, *x.shape[-2:])
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)


def _per_head(config: DecoderConfig, rngs: nnx.Rngs, size: int, init: Any, dtype: Any) -> Any:
    """Make a vector that is divided over ranks by heads."""
    pieces = "num_kv_heads", config.kv_heads, None
    return make_weight(rngs, (size,), init=init, dtype=dtype, axis=TENSOR, dim=0, pieces=pieces)


def check_not_remembered(first: jax.Array | None, segments: jax.Array | None) -> None:
    """Refuse segments with caches, where a row is one document.

    Raises:
      ValueError: both are given.
    """
    if first is not None and segments is not None:
        raise ValueError(
            "segments= was given to attention that decodes with caches: a row that is "
            "generated is one document; leave segments= out, or score packed rows by "
            "pipe.logprobs"
        )


def check_whole(what: str, context: Context) -> None:
    """Refuse a context axis for attention that needs whole sequences.

    Raises:
      ValueError: sequences are split over a context axis.
    """
    if context.axis is not None:
        raise ValueError(
            f"{what} with sequences that are cut over a mesh axis (context={context!r}): no way of "
            f"exchanging keys and values has them; leave context= out"
        )
