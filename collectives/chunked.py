"""Cross entropy of a linear head that never holds all logits.

The head's rows are processed in chunks. The forward keeps a running maximum and a running sum of
exponentials for each token (M. Milakov and N. Gimelshein, arXiv:1805.02867). The backward computes
each chunk's logits again, which costs one more matrix product than a head that keeps its logits.
The largest array is therefore `[n, v / C]`, while kept logits and their gradient are two arrays
`[n, v]`.

Letters: R = ranks on the axis, v = rows of the vocabulary on one rank, V = R·v, d = width, n =
tokens, C = chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from collectives.compat import vary, varying_axes
from collectives.places.sizes import TENSOR
from collectives.tensor import group_rank, group_size
from collectives.vocabulary import (
    IGNORED,
    LOWEST,
    Terms,
    check_labels,
    check_parts,
    combine,
    find_rows,
    logit_gradient,
    losses_of,
    mask_losses,
    sum_up,
)


def linear_cross_entropy(
    x: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    axis: str | None = TENSOR,
    *,
    chunks: int,
    ignore: int | None = IGNORED,
    vocabulary: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Compute the cross entropy of each token from the input of a linear head `x @ table.T`.

    Products are summed in float32.

    Args:
      x: `[..., d]`, equal on all ranks (`column_input` of an activation).
      table: `[v, d]`, this rank's rows; converted to the dtype of `x`.
      labels: `[...]` integers, equal on all ranks.
      axis: the mesh axis of the group.
      chunks: C, a divisor of v.
      ignore: labels whose loss is 0; None if there are none.
      vocabulary: the number of words among the V rows; the rows after them are padding, with
        probability 0.
      label_smoothing: the part of a label's probability that all words share (`Terms`).
      z_loss: the factor of the square of log Σ exp(logit), which is added.

    Returns:
      `[...]` float32, equal on all ranks; NaN for a label that is not a word and is not ignored.

    Raises:
      ValueError: C does not divide v; the table does not vary over the axis; or the labels have the
        wrong shape.
    """
    rows = table.shape[0]
    check_parts("table", table, axis)
    check_labels("x", x, labels)
    if chunks < 1 or rows % chunks:
        fits = ", ".join(str(c) for c in range(1, min(rows, 64) + 1) if rows % c == 0)
        raise ValueError(
            f"chunks={chunks}: must divide the {rows} rows of the vocabulary that a rank holds; "
            f"up to 64 these do: {fits}"
        )
    size = rows * group_size(axis) if vocabulary is None else vocabulary
    axes = varying_axes(x) | varying_axes(table) | varying_axes(labels)
    x, table = vary((x, table.astype(x.dtype)), tuple(axes))
    flat = x.reshape(-1, x.shape[-1]), table, labels.reshape(-1)
    terms = Terms(label_smoothing, z_loss, size)
    losses = _losses(*flat, (axis, chunks, terms)).reshape(labels.shape)
    return mask_losses(losses, labels, size, ignore)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses(x: jax.Array, table: jax.Array, labels: jax.Array, how: Any) -> jax.Array:
    return _forward(x, table, labels, how)[0]


def _forward(x: jax.Array, table: jax.Array, labels: jax.Array, how: Any) -> Any:
    axis, chunks, terms = how

    def step(carry: Any, chunk: Any) -> Any:
        logits = _logits(x, chunk, table.shape[0], how)
        columns = _find(labels, chunk, table.shape[0], how)
        return sum_up(logits, *columns, carry, terms=terms), None

    axes = tuple(varying_axes(x) | varying_axes(labels))
    zeros = jnp.zeros(x.shape[:1], jnp.float32)
    start = vary((zeros + LOWEST, zeros, zeros), axes)
    (largest, total, picked), _ = jax.lax.scan(step, start, _cut(table, chunks))
    largest, total, picked = combine(largest, total, picked, axis)
    return losses_of(largest, total, picked, terms), (x, table, labels, largest, total)


def _backward(how: Any, kept: Any, g: jax.Array) -> Any:
    x, table, labels, largest, total = kept

    def step(dx: jax.Array, chunk: Any) -> Any:
        logits = _logits(x, chunk, table.shape[0], how)
        local, mine = _find(labels, chunk, table.shape[0], how)
        dlogits = logit_gradient(logits, local, mine, largest, total, g, how[2]).astype(x.dtype)
        dx += jnp.matmul(dlogits, chunk[1], preferred_element_type=jnp.float32)
        return dx, jnp.matmul(dlogits.T, x)

    start = vary(jnp.zeros(x.shape, jnp.float32), tuple(varying_axes(x)))
    dx, rows = jax.lax.scan(step, start, _cut(table, how[1]))
    return dx.astype(x.dtype), rows.reshape(table.shape), None


_losses.defvjp(_forward, _backward)


def _cut(table: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Return the index of each chunk, and its rows."""
    return jnp.arange(chunks), table.reshape(chunks, -1, table.shape[-1])


def _logits(x: jax.Array, chunk: Any, local: int, how: Any) -> jax.Array:
    """Compute the logits of one chunk, `[n, v / C]` float32; -inf for padding."""
    (axis, _, terms), (index, rows) = how, chunk
    logits = jnp.matmul(x, rows.T, preferred_element_type=jnp.float32)
    if terms.words == local * group_size(axis):
        return logits
    first = group_rank(axis) * local + index * len(rows)
    return jnp.where(first + jnp.arange(len(rows))[None] < terms.words, logits, -jnp.inf)


def _find(labels: jax.Array, chunk: Any, local: int, how: Any) -> tuple[jax.Array, jax.Array]:
    """Find the columns of labels in a chunk, and a mask of the labels within the chunk."""
    index, rows = chunk
    return find_rows(labels, rows.shape[0], first=group_rank(how[0]) * local + index * len(rows))
