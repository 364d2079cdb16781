"""Weights with metadata on how they may be divided, and linear layers divided by columns or rows.

The metadata of such an `nnx.Param` has ``out_sharding``, an axis name or None for each dimension.
The metadata also has ``pieces``: the name of the parts of the divided dimension, their number, and
the option that pads it. A rank must hold whole pieces: heads, not columns.

Letters: R = ranks on the axis, t = positions, d = width in, e = width out. See `collectives.tensor`
for the exchanges of the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import varying_axes
from collectives.places.sizes import TENSOR
from collectives.tensor import check_divides, column_input, is_manual, row_output

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Pieces = tuple[str, int, str | None]  # name, number, the option that helps (`check_divides`)


def make_weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    *,
    init: Initializer,
    dtype: Any,
    axis: str | None,
    dim: int,
    pieces: Pieces,
) -> nnx.Param[Any]:
    """Make a whole weight whose dimension ``dim`` is divided over ``axis``."""
    names = tuple(axis if index == dim else None for index in range(len(shape)))
    value = init(rngs.params(), shape, dtype)
    # Eager sharding would need a mesh while the model is built.
    return nnx.Param(value, out_sharding=names, eager_sharding=False, pieces=pieces)


def shared(
    value: jax.Array, axis: str | None, kind: type[nnx.Param[Any]] = nnx.Param
) -> nnx.Param[Any]:
    """Make a weight that all ranks have whole.

    Args:
      value: the weight.
      axis: an axis along which ranks use the weight on different activations, so that its gradient
        is a sum over ranks; None if there is none.
      kind: the kind of parameter.
    """
    # `pipeline.core.placement.placement` reads it.
    return kind(value) if axis is None else kind(value, gradient_over=axis)


def read_weight(weight: nnx.Param[Any], x: jax.Array, axis: str | None) -> jax.Array:
    """Read this rank's part of a weight, in the dtype of the input ``x``.

    Raises:
      ValueError: the input is no float; or the axis is manual, and the weight is not divided over
        it or cannot be divided into whole pieces.
    """
    value: jax.Array = weight.get_value()
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}: a layer computes in the dtype of its input, which "
            f"must be a float; embed integers first"
        )
    check_cut(weight, axis)
    return value.astype(x.dtype)


def check_cut(weight: nnx.Param[Any], axis: str | None) -> None:
    """Refuse a weight that is not this rank's part: its product would be summed once per rank."""
    if not is_manual(axis):
        return
    what, count, pad_with = weight.get_metadata("pieces")
    check_divides(what, count, axis, pad_with=pad_with)
    value = weight.get_value()
    if axis not in varying_axes(value):
        names = ", ".join(map(repr, weight.get_metadata("out_sharding")))
        raise ValueError(
            f"a weight {list(value.shape)} is whole on every rank of {axis!r}: hand each rank its "
            f"part, in_specs=PartitionSpec({names}), and run shard_map with check_vma=True"
        )


def scaled(fan_in: int) -> Initializer:
    """Make an initializer of normal numbers that keeps the scale of a product's input."""
    return jax.nn.initializers.normal(fan_in**-0.5)


def apply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute `[..., d] @ [d, e]` as one flat product.

    Without flattening, XLA's CPU backend takes up to half as long again for the gradients.
    """
    flat = x.reshape(-1, x.shape[-1]) @ weight
    return flat.reshape(*x.shape[:-1], weight.shape[-1])


class _Linear(nnx.Module):
    """A weight `[d, e]` that is divided along one of its dims, optionally with a bias."""

    _dim: int  # the divided dim, 0 or 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
        pieces: Pieces | None = None,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        shape, names = (in_features, out_features), ("in_features", "out_features")
        pieces = pieces or (names[self._dim], shape[self._dim], None)
        make = functools.partial(make_weight, rngs, dtype=dtype, axis=axis, pieces=pieces)
        self.weight = make(shape, init=init or scaled(in_features), dim=self._dim)
        added: nnx.Param[Any] | None = None
        if bias and self._dim == 1:
            added = make((out_features,), init=jax.nn.initializers.zeros, dim=0)
        elif bias:
            added = shared(jnp.zeros(out_features, dtype), axis if sequence_parallel else None)
        self.bias = added


class ColumnLinear(_Linear):
    """A layer divided by columns: each rank makes some outputs, `[..., t, d] -> [..., t, e / R]`.

    Args:
      in_features: d.
      out_features: e.
      rngs: random streams, with a stream ``params``.
      bias: whether there is a bias; each rank adds its part.
      axis: the mesh axis of the group.
      sequence_parallel: whether the input is this rank's part of the sequence, `[..., t / R, d]`.
      init: the initializer of the weight.
      dtype: the dtype of the parameters.
      pieces: the parts of e that must not be divided, as (name, number, the option that pads it or
        None); by default single outputs.

    Raises:
      ValueError: when called on R ranks, R does not divide the number of pieces.
    """

    _dim = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute this rank's outputs for the whole sequence."""
        weight = read_weight(self.weight, x, self.axis)
        y = apply(column_input(x, self.axis, sequence_axis=self.sequence_axis), weight)
        return y if self.bias is None else y + _row(read_weight(self.bias, x, self.axis), y)


class RowLinear(_Linear):
    """A layer divided by rows: each rank takes some inputs, `[..., t, d / R] -> [..., t, e]`.

    `ColumnLinear` explains arguments and errors, except

    * bias: it is added after the sum, and equal on all ranks;
    * sequence_parallel: whether each rank keeps its part of the sequence, `[..., t / R, e]`;
    * pieces: the parts of d that must not be divided.
    """

    _dim = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the sum over ranks, or this rank's part of the sum."""
        y = apply(x, read_weight(self.weight, x, self.axis))
        y = row_output(y, self.axis, sequence_axis=self.sequence_axis)
        return y if self.bias is None else y + _row(self.bias.get_value().astype(y.dtype), y)


def _row(bias: jax.Array, y: jax.Array) -> jax.Array:
    return bias.reshape((1,) * (y.ndim - 1) + (-1,))
