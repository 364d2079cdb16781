"""Embedding and cross entropy over a vocabulary whose rows are split over ranks.

Letters: R = ranks on the axis, v = rows of the vocabulary on one rank, V = R·v = rows on all ranks,
d = width. Rank r holds the rows r·v .. (r+1)·v-1. Tokens and labels are global, in 0..V-1, and
equal on all ranks. No rank reads the logits of other ranks: cross entropy exchanges one maximum and
two sums per token. M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053.

Any axis is allowed: `tensor`, or `stage` if all ranks share a microbatch's head. If the axis is not
manual, R is 1 and the functions are the plain functions. All statistics are float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from collectives.compat import vary, varying_axes
from collectives.places.sizes import TENSOR
from collectives.tensor import group_rank, group_size, is_manual, row_output

IGNORED = -100  # a label whose loss is 0
LOWEST = -3e38  # in place of -inf, because -inf - -inf is NaN

Sums = tuple[jax.Array, jax.Array, jax.Array]  # the results of `sum_up`


class Terms(NamedTuple):
    """The terms of a loss in addition to the plain cross entropy.

    Attributes:
      label_smoothing: the part of a label's probability that all words share equally. Columns with
        a logit of -inf get no share.
      z_loss: the factor of the square of log Σ exp(logit).
      words: the number of words.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    words: int = 1


PLAIN = Terms()


def vocabulary_embedding(
    table: jax.Array,
    tokens: jax.Array,
    axis: str | None = TENSOR,
    *,
    sequence_axis: int | None = None,
    vocabulary: int | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Look up rows of a table that is split over ranks.

    Args:
      table: `[v, d]`, this rank's rows.
      tokens: integers of any shape `[...]`, equal on all ranks. A token outside 0..V-1 gives zeros.
      axis: the mesh axis of the group; None if there is one rank.
      sequence_axis: the axis of the result along which each rank keeps its part.
      vocabulary: the number of words among the V rows; a token that is not a word then gives NaN.
      dtype: the dtype of the result; by default the dtype of the table.

    Returns:
      `[..., d]`.

    Raises:
      ValueError: the table does not vary over the axis; or an error of `row_output`.
    """
    check_parts("table", table, axis)
    local, mine = _find(tokens, table.shape[0], axis)
    rows = jnp.take(table, local, axis=0, mode="clip").astype(dtype or table.dtype)
    others = jnp.zeros((), rows.dtype)
    if vocabulary is not None:
        _, is_word = find_rows(tokens, vocabulary, first=0)
        mine &= is_word
        others = jnp.where(is_word, others, jnp.full((), jnp.nan, rows.dtype))[..., None]
    rows = jnp.where(mine[..., None], rows, others)
    return rows if axis is None else row_output(rows, axis, sequence_axis=sequence_axis)


def vocabulary_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    axis: str | None = TENSOR,
    *,
    ignore: int | None = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Compute the cross entropy of each token from split logits, without gathering the logits.

    The backward keeps the given logits and one number per token, and computes the gradient in the
    dtype of the logits.

    Args:
      logits: `[..., v]`, this rank's part, of any float dtype; -inf for impossible labels.
      labels: `[...]` integers, equal on all ranks.
      axis: the mesh axis of the group; None if there is one rank.
      ignore: labels whose loss is 0; None if there are none.
      label_smoothing: the part of a label's probability that all V columns share (`Terms`).
      z_loss: the factor of the square of log Σ exp(logit), which is added.

    Returns:
      `[...]` float32, equal on all ranks. A label outside 0..V-1 that is not ignored gives NaN, a
      label whose logit is -inf gives inf.

    Raises:
      ValueError: the logits do not vary over the axis, so they are not split over ranks; or the
        labels have the wrong shape.
    """
    check_parts("logits", logits, axis)
    check_labels("logits", logits, labels)
    logits = vary(logits, tuple(varying_axes(labels) - varying_axes(logits) - {axis}))
    words = group_size(axis) * logits.shape[-1]
    losses = _cross_entropy(logits, labels, axis, Terms(label_smoothing, z_loss, words))
    return mask_losses(losses, labels, words, ignore)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(
    logits: jax.Array, labels: jax.Array, axis: str | None, terms: Terms
) -> jax.Array:
    return _cross_entropy_forward(logits, labels, axis, terms)[0]


def _cross_entropy_forward(
    logits: jax.Array, labels: jax.Array, axis: str | None, terms: Terms
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    found = sum_up(logits, *_find(labels, logits.shape[-1], axis), terms=terms)
    largest, total, picked = combine(*found, axis)
    return losses_of(largest, total, picked, terms), (logits, labels, largest, total)


def _cross_entropy_backward(
    axis: str | None, terms: Terms, kept: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, None]:
    logits, labels, largest, total = kept
    local, mine = _find(labels, logits.shape[-1], axis)
    return logit_gradient(logits, local, mine, largest, total, g, terms), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def sum_up(
    logits: jax.Array,
    local: jax.Array,
    mine: jax.Array,
    so_far: Sums | None = None,
    *,
    terms: Terms = PLAIN,
) -> Sums:
    """Compute the terms of cross entropy over some columns, and add them to earlier sums.

    Args:
      logits: `[..., v]`; -inf for impossible labels.
      local: `[...]`, the labels' columns.
      mine: `[...]`, whether each label is among these columns.
      so_far: the sums of other columns.
      terms: the smoothing of labels, if there is any.

    Returns:
      `[...]` float32 each: the largest logit, Σ exp(logit - largest), and the label's logit, which
      is 0 if the label is in another column. With smoothing the last is Σ probability * logit.
    """
    wide = logits.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(wide, axis=-1), LOWEST if so_far is None else so_far[0])
    total = jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1)
    picked = jnp.take_along_axis(wide, local[..., None], axis=-1)[..., 0]
    picked = jnp.where(mine, picked, 0.0)
    if terms.label_smoothing:
        share = terms.label_smoothing / terms.words
        possible = jnp.where(wide > -jnp.inf, wide, 0.0)
        picked = (1 - terms.label_smoothing) * picked + share * jnp.sum(possible, axis=-1)
    if so_far is None:
        return largest, total, picked
    return largest, so_far[1] * jnp.exp(so_far[0] - largest) + total, so_far[2] + picked


def losses_of(
    largest: jax.Array, total: jax.Array, picked: jax.Array, terms: Terms = PLAIN
) -> jax.Array:
    """Compute the cross entropy from sums over all columns."""
    # This order keeps all digits of large logits that are nearly equal.
    losses = jnp.log(total) + (largest - picked)
    return losses + terms.z_loss * (jnp.log(total) + largest) ** 2 if terms.z_loss else losses


def logit_gradient(
    logits: jax.Array,
    local: jax.Array,
    mine: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    g: jax.Array,
    terms: Terms = PLAIN,
) -> jax.Array:
    """Compute the gradient of cross entropy: softmax minus the label's probabilities, times `g`.

    Args:
      logits: `[..., v]`.
      local: `[...]`, the labels' columns.
      mine: `[...]`, whether each label is among these columns.
      largest: `[...]`, the largest logit of the whole vocabulary.
      total: `[...]`, Σ exp(logit - largest) over the whole vocabulary.
      g: `[...]`, the gradient for the losses.
      terms: the terms of the loss.
    """
    columns = jax.lax.broadcasted_iota(local.dtype, logits.shape, logits.ndim - 1)
    hit = (columns == local[..., None]) & mine[..., None]
    shares = jnp.exp(logits.astype(jnp.float32) - largest[..., None]) / total[..., None]
    if terms.z_loss:
        shares *= (1 + 2 * terms.z_loss * (jnp.log(total) + largest))[..., None]
    if terms.label_smoothing:
        shares -= jnp.where(logits > -jnp.inf, terms.label_smoothing / terms.words, 0.0)
    at_label = shares - (1 - terms.label_smoothing)
    return (jnp.where(hit, at_label, shares) * g[..., None]).astype(logits.dtype)


def combine(largest: jax.Array, total: jax.Array, picked: jax.Array, axis: str | None) -> Sums:
    """Combine the sums of all ranks, by one maximum and one sum, for the whole vocabulary.

    Args:
      largest: `[...]`, this rank's largest logit.
      total: `[...]`, this rank's Σ exp(logit - largest).
      picked: `[...]`, the label's logit on the rank that has it, 0 on other ranks.
      axis: the mesh axis of the group.
    """
    if not is_manual(axis):
        return largest, total, picked
    overall = jax.lax.pmax(vary(largest, axis), axis)
    addends = vary(jnp.stack([total * jnp.exp(largest - overall), picked]), axis)
    total, picked = jax.lax.psum(addends, axis)
    return overall, total, picked


def find_rows(
    indices: jax.Array, rows: int, *, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Find global indices among ``rows`` rows from `first`; return clipped columns and a mask."""
    local = indices.astype(jnp.int32) - first
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


def _find(indices: jax.Array, rows: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Find global indices among this rank's rows."""
    return find_rows(indices, rows, first=group_rank(axis) * rows)


def mask_losses(losses: jax.Array, labels: jax.Array, size: int, ignore: int | None) -> jax.Array:
    """Set losses to NaN for labels outside the vocabulary, and to 0 for ignored labels."""
    known = (labels >= 0) & (labels < size)
    losses = jnp.where(known, losses, jnp.nan)
    return losses if ignore is None else jnp.where(labels == ignore, 0.0, losses)


def check_labels(name: str, x: jax.Array, labels: jax.Array) -> None:
    """Refuse labels of another shape, which would be broadcast or read in another order."""
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels{list(labels.shape)}: must have a label for each token of "
            f"{name}{list(x.shape)}, so the shape {list(x.shape[:-1])}"
        )


def check_parts(name: str, x: jax.Array, axis: str | None) -> None:
    """Refuse a value that is not split over the axis: every rank would count the value again."""
    if is_manual(axis) and axis not in varying_axes(x):
        raise ValueError(
            f"{name}{list(x.shape)} does not vary over {axis!r}: it must be this rank's part of "
            f"the vocabulary; shard it over {axis!r}, and run shard_map with check_vma=True"
        )
