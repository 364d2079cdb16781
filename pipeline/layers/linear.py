"""A linear layer cut by columns and one cut by rows, which belong together.

Letters: R = ranks on the axis, t = positions, d = width in, e = width out. See `collectives.tensor`
for what they exchange.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.sizes import TENSOR
from collectives.tensor import column_input, row_output
from pipeline.layers.weights import (
    Initializer,
    Pieces,
    apply,
    make_weight,
    read_weight,
    scaled,
    shared,
)


class ColumnLinear(nnx.Module):
    """Each rank makes some of the outputs: `[..., t, d] -> [..., t, e / R]`.

    Args:
      in_features: d.
      out_features: e.
      rngs: has a stream ``params``.
      bias: whether something is added; each rank adds its part.
      axis: the mesh axis of the group.
      sequence_parallel: whether the input is this rank's part of the sequence, `[..., t / R, d]`.
      init: of the weight.
      dtype: of the parameters.
      pieces: what e consists of, as (name, number, the option that pads it or None); by default
        single outputs.

    Raises:
      ValueError: when called on R ranks, that R does not divide the number of pieces.
    """

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
        cut: dict[str, Any] = {
            "axis": axis,
            "pieces": pieces or ("out_features", out_features, None),
        }
        shape = in_features, out_features
        init = init or scaled(in_features)
        self.weight = make_weight(rngs, shape, init=init, dtype=dtype, dim=1, **cut)
        zeros = jax.nn.initializers.zeros
        self.bias = (
            make_weight(rngs, shape[1:], init=zeros, dtype=dtype, dim=0, **cut) if bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """This rank's outputs, of the whole sequence."""
        weight = read_weight(self.weight, x, self.axis)
        y = apply(column_input(x, self.axis, sequence_axis=self.sequence_axis), weight)
        return y if self.bias is None else y + _row(read_weight(self.bias, x, self.axis), y)


class RowLinear(nnx.Module):
    """Each rank takes some of the inputs: `[..., t, d / R] -> [..., t, e]`.

    Args:
      in_features: d.
      out_features: e.
      rngs: has a stream ``params``.
      bias: whether something is added; after the sum, and the same on all ranks.
      axis: the mesh axis of the group.
      sequence_parallel: whether each rank keeps its part of the sequence, `[..., t / R, e]`.
      init: of the weight.
      dtype: of the parameters.
      pieces: what d consists of, as for `ColumnLinear`.

    Raises:
      ValueError: when called on R ranks, that R does not divide the number of pieces.
    """

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
        self.weight = make_weight(
            rngs,
            (in_features, out_features),
            init=init or scaled(in_features),
            dtype=dtype,
            axis=axis,
            dim=0,
            pieces=pieces or ("in_features", in_features, None),
        )
        own = axis if sequence_parallel else None
        self.bias = shared(jnp.zeros(out_features, dtype), own) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum over ranks, or this rank's part of it."""
        y = apply(x, read_weight(self.weight, x, self.axis))
        y = row_output(y, self.axis, sequence_axis=self.sequence_axis)
        return y if self.bias is None else y + _row(self.bias.get_value().astype(y.dtype), y)


def _row(bias: jax.Array, y: jax.Array) -> jax.Array:
    return bias.reshape((1,) * (y.ndim - 1) + (-1,))
