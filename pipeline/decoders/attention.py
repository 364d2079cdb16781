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
from pipeline.layers.attention import attend

HIDDEN = -1e30  # a score that counts for nothing


class DecoderAttention(nnx.Module):
    """`[b, t, d] -> [b, t, d]`: every position reads itself and those before it.

    Args:
      config: of the decoder.
      layer: which of its layers this is.
      rngs: has a stream ``params``.
      dtype: of the parameters; activations: of what is kept of keys and values, by default that.
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
    ) -> None:
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

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Attend; to what it remembers too, once it was told to (`start_decoding`).

        Args:
          x: `[b, t, d]`, of a decoder the positions that follow those it has seen.
          positions: `[b, t]`, by default 0..t-1, or behind those seen. They turn queries and keys;
            what a position may read is decided by its place in the sequence.
        """
        first = self.seen[...] if hasattr(self, "seen") else None
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = jnp.arange(q.shape[1])[None]
                positions = positions if first is None else positions + first
            turns = rotary(positions, q.shape[-1], theta=self.rope.theta, scaling=self.rope.scaling)
            q, k = rotate(q, *turns), rotate(k, *turns)
        y = self._read(q, k, v) if first is None else self._remember(q, k, v, first)
        return self.out(y.reshape(*y.shape[:2], -1))

    def _read(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attention over local heads: by the platform's kernel where it is the usual one."""
        t, usual = q.shape[1], q.shape[-1] ** -0.5
        scale = usual if self.scale is None else self.scale
        window = None if self.window is None or self.window >= t else self.window
        if window is None and self.softcap is None:
            return attend(q if scale == usual else q * jnp.asarray(scale / usual, q.dtype), k, v)
        return _read(q, k, v, scale, window, self.softcap)

    def _remember(self, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
        """Attention to these positions and to those before, which are kept."""
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[...] = jax.lax.dynamic_update_slice(
                cache[...], new.astype(self.kept_dtype), (0, first, 0, 0)
            )
        t, length = q.shape[1], self.keys.shape[1]
        self.seen[...] = first + t
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        keys, values = self.keys[...], self.values[...]
        window = None if self.window is None or self.window >= length else self.window
        return _read(q, keys, values, scale, window, self.softcap, first)


def _read(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None,
    first: jax.Array | None = None,
) -> jax.Array:
    """The formula, in float32, returned in the dtype of q.

    Args:
      q: queries, `[b, t, heads, c]`.
      k: keys, `[b, s, k, c]`.
      v: values, the same.
      scale: of scores.
      window: how many positions a query sees; None for all before it.
      softcap: of scores, if any.
      first: where the first query is among the keys; None where there are as many of both.
    """
    b, t, _, c = q.shape
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    grouped = wide_q.reshape(b, t, k.shape[2], -1, c) * scale
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, wide_k)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    places = jnp.arange(t) if first is None else first + jnp.arange(t)
    back = places[:, None] - jnp.arange(k.shape[1])[None]
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, HIDDEN), axis=-1)
    return jnp.einsum("bkgts,bskc->btkgc", weights, wide_v).reshape(q.shape).astype(q.dtype)
