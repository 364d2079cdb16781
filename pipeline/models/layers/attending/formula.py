"""The formula of attention, and the rule that says which keys a query reads.

Letters: b = sequences, t = queries, s = keys, c = width of a head, k = heads of keys and values, g
= heads of queries for each of them, w = width of values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pipeline.base.arguments import is_whole
from pipeline.models.layers.attending.order import WHOLE, Context

Implementation = Literal["splash", "cudnn", "xla", "chunked"]
HIDDEN = -1e30  # the score of a key that a query does not read
MOST_PAIRS = 2**20  # the most scores of a head formed at a time, without `query_chunk`


class OfRule:
    """An attribute of a layer that reads and writes a field of its `Rule`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else getattr(layer.rule, self._name)

    def __set__(self, layer: Any, value: Any) -> None:
        layer.rule = replace(layer.rule, **{self._name: value})


@dataclass(frozen=True)
class Rule:
    """The options of one call of attention.

    Attributes:
      window: the number of positions that a query reads, including its own; None for all positions.
      softcap: a cap s of the scores, which become s·tanh(score / s); None for no cap.
      scale: the factor of scores; None for c ** -0.5.
      query_chunk: the number of queries scored at a time; None to compute it by `chunk_of`.
      implementation: the name of the implementation; None for the platform's implementation.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    query_chunk: int | None = None
    implementation: Implementation | None = None
    context: Context = WHOLE

    def __post_init__(self) -> None:
        window, softcap, names = self.window, self.softcap, get_args(Implementation)
        if self.implementation not in (None, *names):
            raise ValueError(
                f"implementation={self.implementation!r}: must be one of "
                f"{', '.join(map(repr, names))}, or None for that of the platform"
            )
        if window is not None and not is_whole(window, 1):
            raise ValueError(
                f"window={window!r}: how many positions a query reads is an integer >= 1, or None "
                f"for all before it"
            )
        is_number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
        if softcap is not None and not (is_number and softcap > 0):
            raise ValueError(
                f"softcap={softcap!r}: a cap of scores is a number > 0, or None for none"
            )

    def factor(self, width: int) -> float:
        return width**-0.5 if self.scale is None else self.scale

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Compute `[b, k, g, t, s]` float32 scores.

        Args:
          q: float32 queries in groups, `[b, t, k, g, c]`.
          k: keys, `[b, s, k, c]`.
        """
        scale = self.factor(q.shape[-1])
        scores = jnp.einsum("btkgc,bskc->bkgts", q * scale, k.astype(jnp.float32))
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        return scores


def chunk_of(t: int, s: int) -> int:
    """Choose how many of t queries are scored with s keys at a time: t up to `MOST_PAIRS` scores.

    For more scores, queries are divided into equal chunks; the last may be padded.
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
    """Mark the keys that each query reads, `[1 or b, t, s]`.

    Args:
      places: `[t]` places of the queries in their sequence.
      of_keys: `[s]` places of the keys.
      window: the number of positions that a query reads, including its own; None for all positions.
      segments: `[b, t]` of the queries; None if a row is one document.
      segments_of_keys: `[b, s]` of the keys.
    """
    back = places[:, None] - of_keys[None]
    seen = ((back >= 0) if window is None else (back >= 0) & (back < window))[None]
    if segments is None or segments_of_keys is None:
        return seen
    return seen & (segments[:, :, None] == segments_of_keys[:, None, :])


def read(
    rule: Rule, sinks: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> jax.Array:
    """Compute attention by its formula, `[b, t, k·g, w]`, in float32 and returned in q's dtype.

    `jax.nn.dot_product_attention` is not used: its backward mixes types, which strict promotion
    refuses.

    Args:
      sinks: `[k·g]`, an extra score of each head without a key or value.
      q: queries, `[b, t, k·g, c]`.
      k: keys, `[b, s, k, c]`.
      v: values, `[b, s, k, w]`.
      seen: `[1 or b, t, s]`, the keys that a query reads (`visible`).
    """
    grouped = q.astype(jnp.float32).reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = rule.scores(grouped, k)
    scores = jnp.where(seen[:, None, None], scores, HIDDEN)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    y = jnp.einsum("bkgts,bskw->btkgw", weights, v.astype(jnp.float32))
    return y.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype)
