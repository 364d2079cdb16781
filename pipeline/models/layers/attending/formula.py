"""The formula of attention, and which keys a query reads.

Letters: b = sequences, t = queries, s = keys, c = width of a head, k = heads of keys and values, g
= heads of queries for each of them, w = width of values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIDDEN = -1e30  # the score of a key that a query does not read
MOST_PAIRS = 2**20  # scores of a head that are formed at a time, where nobody says how many


def chunk_of(t: int, s: int) -> int:
    """Choose how many of t queries are scored with s keys at a time: t up to `MOST_PAIRS` scores.

    Beyond, queries are divided into equal chunks, of which the last one may be padded.
    """
    parts = max(1, min(t, -(-t * s // MOST_PAIRS)))
    return -(-t // parts)


def cut(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Cut an axis into chunks along a new first axis; zeros fill the last chunk."""
    t = x.shape[axis]
    if t % size:
        x = jnp.pad(x, [(0, -t % size if n == axis else 0) for n in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def join(x: jax.Array, t: int, axis: int) -> jax.Array:
    """Undo `cut` of an axis of length t."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x if x.shape[axis] == t else jax.lax.slice_in_dim(x, 0, t, axis=axis)


def visible(
    places: jax.Array,
    of_keys: jax.Array,
    window: int | None = None,
    segments: jax.Array | None = None,
    segments_of_keys: jax.Array | None = None,
) -> jax.Array:
    """Mark which of s keys each of t queries reads, `[1 or b, t, s]`.

    Args:
      places: `[t]` of the queries in their sequence.
      of_keys: `[s]` of the keys.
      window: how many positions a query reads, its own and those before it; None for all.
      segments: `[b, t]` of the queries; None where a row is one document.
      segments_of_keys: `[b, s]`.
    """
    back = places[:, None] - of_keys[None]
    seen = ((back >= 0) if window is None else (back >= 0) & (back < window))[None]
    if segments is None or segments_of_keys is None:
        return seen
    return seen & (segments[:, :, None] == segments_of_keys[:, None, :])


def read(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention by its formula, `[b, t, k·g, w]`, in float32 and returned in q's dtype.

    `jax.nn.dot_product_attention` mixes types in its backward, which strict promotion refuses.

    Args:
      q: queries, `[b, t, k·g, c]`.
      k: keys, `[b, s, k, c]`.
      v: values, `[b, s, k, w]`.
      seen: `[1 or b, t, s]`, which keys a query reads (`visible`).
      scale: of the scores, by default c ** -0.5.
      softcap: of the scores, if any.
      sinks: `[k·g]`, a score of each head beside those of its keys, whose weight goes to no value.
    """
    b, t, _, c = q.shape
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    grouped = wide_q.reshape(b, t, k.shape[2], -1, c) * (c**-0.5 if scale is None else scale)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, wide_k)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, HIDDEN)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    y = jnp.einsum("bkgts,bskw->btkgw", weights, wide_v)
    return y.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype)
