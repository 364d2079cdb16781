"""A pair of linear layers: one divided by columns, one divided by rows.

Letters: R = ranks on the axis, t = positions, d = width in, e = width out. See `collectives.tensor`
for their exchanges.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.places.sizes import TENSOR
from collectives.tensor import column_input, row_output
from pipeline.models.layers.weights import (
    Initializer,
    Pieces,
    apply,
    make_weight,
    read_weight,
    scaled,
    shared,
)


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

    The arguments and errors are those of `ColumnLinear`, except

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
