"""Causal attention as decoders vary it: normed queries and keys, windows, soft caps, biases.

Letters as in `pipeline.layers.attention`: b = sequences, t = positions, d = width, c = width of a
head, k = heads of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.tensor import group_size
from pipeline.decoders.config import DecoderConfig
from pipeline.layers import FusedQKV, RMSNorm, RowLinear, rotary, rotate
from pipeline.layers.attending.formula import read, visible
from pipeline.layers.attending.order import WHOLE, Context
from pipeline.layers.attention import attend


class DecoderAttention(nnx.Module):
    """`[b, t, d] -> [b, t, d]`: every position reads itself and those before it.

    Args:
      config: of the decoder.
      layer: which of its layers this is.
      rngs: has a stream ``params``.
      dtype: of the parameters; activations: of what is kept of keys and values, by default that.
      context: how sequences lie on the ranks of an axis.
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
        self.out = RowLinear(
            heads * c,
            config.width,
            rngs,
            bias=config.out_bias,
            dtype=dtype,
            pieces=("num_kv_heads", config.kv_heads, None),
        )
        # A rank norms heads of its own, so the gradients of its scales are parts of sums.
        norm: dict[str, Any] = {
            "epsilon": config.norm_epsilon,
            "offset": config.norm_offset,
            "sequence_parallel": True,
            "dtype": dtype,
        }
        self.q_norm = RMSNorm(c, **norm) if config.qk_norm else None
        self.k_norm = RMSNorm(c, **norm) if config.qk_norm else None
        self.rope, self.window = config.rope_of(layer), config.window(layer)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap

    def start_decoding(self, rows: int, length: int) -> None:
        """Have room for the keys and values of that many sequences of that many positions."""
        # Within a stage, a rank of the axis keeps those of its own heads.
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
        """Attend; to what it remembers too, once it was told to (`start_decoding`).

        Args:
          x: `[b, t, d]`, of a decoder the positions that follow those it has seen.
          positions: `[b, t]`, by default 0..t-1, or behind those seen. They turn queries and keys;
            what a position may read is decided by its place in the sequence.
          segments: `[b, t]` integers, the document of each position (`layers.Attention`).

        Raises:
          ValueError: segments for a decoder that remembers, of which a row is one document.
        """
        first = self.seen[...] if hasattr(self, "seen") else None
        if first is not None and segments is not None:
            raise ValueError(
                "segments= was given to attention that decodes with caches: a row that is "
                "generated is one document; leave segments= out, or score packed rows by "
                "pipe.logprobs"
            )
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = self.context.places(q.shape[1])[None]
                positions = positions if first is None else positions + first
            turns = rotary(positions, q.shape[-1], theta=self.rope.theta, scaling=self.rope.scaling)
            q, k = rotate(q, *turns), rotate(k, *turns)
        y = self._read(q, k, v, segments) if first is None else self._remember(q, k, v, first)
        return self.out(y.reshape(*y.shape[:2], -1))

    def _read(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        """Attention over local heads, by the platform's kernel where it takes them."""
        return attend(
            q,
            k,
            v,
            segments=segments,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            context=self.context,
        )

    def _remember(self, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
        """Attention to these positions and to those before, which are kept."""
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[...] = jax.lax.dynamic_update_slice(
                cache[...], new.astype(self.kept_dtype), (0, first, 0, 0)
            )
        t, length = q.shape[1], self.keys.shape[1]
        self.seen[...] = first + t
        window = None if self.window is None or self.window >= length else self.window
        seen = visible(first + jnp.arange(t), jnp.arange(length), window)
        keys, values = self.keys[...], self.values[...]
        return read(q, keys, values, seen, scale=self.scale, softcap=self.softcap)
