"""The table of a vocabulary, its logits and its loss, and marker classes of layers for it.

Letters: N words, d width; b stands for any leading axes of a microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.arguments import is_number
from pipeline.base.tree import is_array, shape_text


class Table(nnx.Param[jax.Array]):
    """[V, d] a whole table, one row per word; rows after the last word are padding."""


class SplitEmbedding:
    """A marker class for an embedding whose table the ranks of ``stage`` can share.

    Such a class has a ``table``, the number of ``words`` and ``sequence_parallel``.
    """


class SplitHead:
    """A marker class for a head with ``features(x)`` whose table ranks of ``stage`` can share."""


def marked(end: Any, mark: type[Any]) -> type[Any] | None:
    """Find the class of an end that inherits directly from the marker class; None if none does."""
    return next((kind for kind in type(end).__mro__ if mark in kind.__bases__), None)


@dataclass(frozen=True)
class CrossEntropy:
    """The negative log likelihood of words, as (sum, weight): a mean over all counted words.

    It is called as ``loss(logits, targets)`` with [b, N] logits, or what a head of
    `pipeline.decoders` returns with ``loss_chunks=``. Targets are the words, [b]
    integers; negative words do not count (-1 and -100 are usual). Or they are a pair of words and
    [b] weights, 0 or False for words that do not count. A word >= N makes the loss NaN.

    Args:
      label_smoothing: the part of a target's probability that all N words share equally, as
        `optax.smooth_labels` and PyTorch divide it. A word with a logit of -inf gets no share.
      z_loss: the factor of (log Σ exp(logits))², which is added for each word (PaLM's 1e-4), so
        that logits stay near 0.

    Raises:
      ValueError: a factor is out of range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("label_smoothing", 1.0), ("z_loss", math.inf)):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < most:
                rule = "a number >= 0 and < 1" if most == 1 else "a finite number >= 0"
                raise ValueError(f"CrossEntropy({name}={value!r}): must be {rule}")

    def tokens(self, targets: Any) -> tuple[jax.Array, jax.Array]:
        """Return [b] words and their float32 weights.

        Raises:
          ValueError: the targets have another form.
        """
        is_pair = isinstance(targets, (tuple, list)) and len(targets) == 2
        ids, weights = targets if is_pair else (targets, None)
        ids_fit = is_array(ids) and jnp.issubdtype(ids.dtype, jnp.integer)
        if not ids_fit or not (weights is None or (is_array(weights) and _alike(weights, ids))):
            given = jax.tree.map(lambda x: shape_text(x) if is_array(x) else repr(x), targets)
            raise ValueError(
                f"targets of CrossEntropy are {given}; give an array of integers, words or below "
                f"0 for what does not count, or a pair (words, weights) of equal shapes"
            )
        ids = ids.astype(jnp.int32)  # a dtype of few bits may not hold N
        weights = jnp.ones((), jnp.bool_) if weights is None else weights
        counts = jnp.broadcast_to(weights.astype(jnp.float32), ids.shape)
        return ids, jax.lax.stop_gradient(jnp.where(ids < 0, 0.0, counts))

    def __call__(self, scores: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
        """Compute (sum, weight), float32 scalars."""
        from collectives import TENSOR, axis_size, varying_axes, vocabulary_cross_entropy

        ids, weights = self.tokens(targets)
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        if hasattr(scores, "losses"):  # the factors of logits, from a head with loss_chunks=
            words, losses_of = scores.words, partial(scores.losses, **options)
        else:
            axis = TENSOR if TENSOR in varying_axes(scores) else None  # logits of a rank's words
            words = scores.shape[-1] * (axis_size(TENSOR) if axis else 1)
            losses_of = partial(vocabulary_cross_entropy, scores, axis=axis, **options)
        lost = losses_of(jnp.clip(ids, 0, words - 1), ignore=None)
        return jnp.sum(lost * spoil(ids, weights, words)), jnp.sum(weights)


def spoil(ids: jax.Array, weights: jax.Array, words: int) -> jax.Array:
    """Set weights to NaN for targets that have a weight but are no word."""
    return jnp.where((ids >= words) & (weights != 0), jnp.nan, weights)


def _alike(weights: Any, ids: Any) -> bool:
    return bool(weights.shape == ids.shape)


def logits(h: jax.Array, table: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Compute [b, N] logits of [b, d] and [N, d], as products in h's dtype, summed in ``dtype``."""
    flat = jnp.dot(
        h.reshape(-1, h.shape[-1]), table.astype(h.dtype).T, preferred_element_type=dtype
    )
    return flat.reshape(*h.shape[:-1], -1)
