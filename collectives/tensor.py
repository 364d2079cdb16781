"""Entry to and exit from a group of ranks that share a layer (tensor and sequence parallelism).

A *column* layer multiplies with some columns of a weight on every rank, a *row* layer with the
matching rows, so that the sum over ranks is the layer's output. Between a column layer and its row
layer there is no exchange. M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053.

    between blocks    `column_input`                     `row_output`
    whole             marked as varying; its             sum over ranks; its gradient
                      gradient is summed over ranks      needs no exchange
    sequence parts    gathered along the sequence; its   summed and scattered along the sequence;
                      gradient is summed and scattered   its gradient is gathered

The second row is sequence parallelism (V. Korthikanti et al., arXiv:2205.05198): the links carry
the same number of bytes, and activations between blocks take 1/R of the memory.

Letters: R = ranks on the axis, t = positions of a sequence. If the axis is not manual (a plain
model, a mesh without it, an axis left to the compiler) R is 1 and every function here returns its
argument. Inside `jax.shard_map` the functions need `check_vma=True`, because the sums of gradients
follow from the axes over which values vary.
"""

from __future__ import annotations

from typing import TypeGuard

import jax
import jax.numpy as jnp

from collectives.compat import vary, varying_axes
from collectives.places.sizes import TENSOR


def is_manual(axis: str | None) -> TypeGuard[str]:
    """Tell whether the surrounding shard_map is manual over `axis`; False if no mesh has it."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def group_size(axis: str | None) -> int:
    """Return the number of ranks R, as a Python integer; 1 if the axis is not manual."""
    return jax.lax.axis_size(axis) if is_manual(axis) else 1


def group_rank(axis: str | None) -> jax.Array | int:
    """Return this rank's position in 0..R-1; the integer 0 if the axis is not manual."""
    return jax.lax.axis_index(axis) if is_manual(axis) else 0


def column_input(
    x: jax.Array, axis: str | None = TENSOR, *, sequence_axis: int | None = None
) -> jax.Array:
    """Prepare the input of a column layer: equal on all ranks, and marked as varying.

    Args:
      x: an activation, equal on all ranks; or with `sequence_axis` this rank's part of an
        activation.
      axis: the mesh axis of the group.
      sequence_axis: the axis of `x`, `[..., t / R, ...]`, that is gathered to `[..., t, ...]`.

    Raises:
      ValueError: `x` varies over the axis without `sequence_axis`, or does not vary with it. The
        gradient would lack the parts of other ranks.
    """
    if not is_manual(axis):
        return x
    varies = axis in varying_axes(x)
    if sequence_axis is None:
        if varies:
            raise ValueError(
                f"x{list(x.shape)} varies over {axis!r} where a column layer takes it: without "
                f"sequence parallelism it must be equal on all ranks and not be marked as varying, "
                f"or its gradient would lack the other ranks' part; end the layer before with "
                f"row_output, or give sequence_axis="
            )
        return vary(x, axis)
    if not varies:
        raise ValueError(
            f"x{list(x.shape)} does not vary over {axis!r} where a sequence parallel layer takes "
            f"it: every rank must hold its own part of the sequence; cut it with "
            f"split_sequence(x, {axis!r}, sequence_axis={sequence_axis})"
        )
    return jax.lax.all_gather(x, axis, axis=_positive(sequence_axis, x), tiled=True)


def row_output(y: jax.Array, axis: str = TENSOR, *, sequence_axis: int | None = None) -> jax.Array:
    """Sum the addends of a row layer over the ranks of its group.

    Each rank gets the whole sum, or with ``sequence_axis`` its own positions of the sum.

    Args:
      y: this rank's addend.
      axis: the mesh axis of the group.
      sequence_axis: the axis of `y`, `[..., t, ...]`, that is scattered to `[..., t / R, ...]`.

    Raises:
      ValueError: `y` does not vary over the axis, so it is no addend; or R does not divide t.
    """
    if not is_manual(axis):
        return y
    if axis not in varying_axes(y):
        raise ValueError(
            f"y{list(y.shape)} does not vary over {axis!r} where a row layer sums it: it is one "
            f"value and not {group_size(axis)} addends; shard the layer's weight over {axis!r}, "
            f"and run shard_map with check_vma=True"
        )
    if sequence_axis is None:
        return jax.lax.psum(y, axis)
    where = _positive(sequence_axis, y)
    _check_sequence(y.shape[where], axis)
    return jax.lax.psum_scatter(y, axis, scatter_dimension=where, tiled=True)


def split_sequence(x: jax.Array, axis: str = TENSOR, *, sequence_axis: int) -> jax.Array:
    """Take this rank's part of an activation that all ranks hold and that no row layer has made.

    Args:
      x: an activation `[..., t, ...]`, equal on all ranks.
      axis: the mesh axis of the group.
      sequence_axis: the axis of `x` that is cut to t / R.

    Raises:
      ValueError: R does not divide t.
    """
    if not is_manual(axis):
        return x
    where = _positive(sequence_axis, x)
    _check_sequence(x.shape[where], axis)
    size = x.shape[where] // group_size(axis)
    return jax.lax.dynamic_slice_in_dim(vary(x, axis), group_rank(axis) * size, size, where)


def join_sequence(x: jax.Array, axis: str = TENSOR, *, sequence_axis: int) -> jax.Array:
    """Gather the whole activation from the parts of all ranks: the inverse of `split_sequence`.

    All ranks then hold the same activation. Each rank takes its part of the gradient, without an
    exchange.

    Args:
      x: this rank's part of an activation, `[..., t / R, ...]`.
      axis: the mesh axis of the group.
      sequence_axis: the axis of `x` that becomes t.
    """
    if not is_manual(axis):
        return x
    where = _positive(sequence_axis, x)
    size = x.shape[where]
    shape = (*x.shape[:where], group_size(axis) * size, *x.shape[where + 1 :])
    room = vary(jnp.zeros(shape, x.dtype), tuple(varying_axes(x)))
    placed = jax.lax.dynamic_update_slice_in_dim(room, x, group_rank(axis) * size, where)
    return jax.lax.psum(placed, axis)


def check_divides(
    what: str,
    size: int,
    axis: str = TENSOR,
    *,
    ranks: int | None = None,
    pad_with: str | None = None,
) -> int:
    """Return `size / R`, the share of a rank; refuse a size that R does not divide.

    Args:
      what: the name of the size, as the user gave it.
      size: the size to divide.
      axis: the mesh axis of the group.
      ranks: R; by default R of the surrounding shard_map.
      pad_with: the option, if any, that rounds the size up to a multiple of its value; or, as
        ``name=True``, the option that gives every rank the whole size.

    Raises:
      ValueError: R does not divide `size`; the message lists the R that fit.
    """
    ranks = group_size(axis) if ranks is None else ranks
    if size % ranks:
        fits = ", ".join(str(r) for r in range(1, min(size, _MOST) + 1) if size % r == 0)
        padded = f"; or pad it to {size + -size % ranks} with {pad_with}={ranks}"
        if pad_with and pad_with.endswith("=True"):
            padded = f"; or let every rank have all with {pad_with}"
        raise ValueError(
            f"{what}={size} over the axis {axis!r} of size {ranks}: every rank holds the same "
            f"number of whole ones; sizes of {axis!r} that fit: {fits}{padded if pad_with else ''}"
        )
    return size // ranks


_MOST = 64  # the largest R that an error lists


def _check_sequence(length: int, axis: str) -> None:
    ranks = group_size(axis)
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} positions over the axis {axis!r} of size {ranks}: with "
            f"sequence parallelism every rank holds an equal part; pad it to "
            f"{length + -length % ranks}, or turn sequence parallelism off"
        )


def _positive(index: int, x: jax.Array) -> int:
    return index % x.ndim
