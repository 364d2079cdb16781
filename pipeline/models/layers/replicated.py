"""Queries, keys and values for more ranks than heads of keys and values.

Letters are those of `pipeline.models.layers.attention`. Each rank has some heads of queries, and
computes the keys and values that they read. A head of keys whose queries are on several ranks is
computed on each of them. Its weight is whole on all ranks, and gets its gradient from the ranks
that use it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.places.sizes import TENSOR
from collectives.tensor import column_input, group_rank, group_size
from pipeline.models.layers.weights import (
    Initializer,
    apply,
    make_weight,
    read_weight,
    scaled,
    shared,
)


class ReplicatedKV(nnx.Module):
    """A layer like `FusedQKV`, with the weights of all k heads of keys and values on all ranks.

    Args:
      width: d.
      num_heads: k·g.
      num_kv_heads: k.
      head_dim: c.
      rngs: random streams, with a stream ``params``.
      axis, sequence_parallel, init, dtype: the options of `ColumnLinear`.

    Raises:
      ValueError: when called on R ranks, R does not divide the heads of queries, or a rank's
        queries read parts of several heads of keys.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rngs: nnx.Rngs,
        *,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        self.group, self.head_dim = num_heads // num_kv_heads, head_dim
        init = init or scaled(width)
        cut: dict[str, Any] = {"axis": axis, "dim": 1, "pieces": ("num_heads", num_heads, None)}
        shape = width, num_heads * head_dim
        self.queries = make_weight(rngs, shape, init=init, dtype=dtype, **cut)
        both = init(rngs.params(), (width, num_kv_heads, 2 * head_dim), dtype)
        self.keys_values = shared(both, axis)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries `[b, t, k·g / R, c]`, keys and values `[b, t, max(1, k / R), c]`."""
        queries, both = read_weight(self.queries, x, self.axis), self._own(x.dtype)
        x = column_input(x, self.axis, sequence_axis=self.sequence_axis)
        heads = (*x.shape[:2], -1, self.head_dim)
        y = apply(x, both.reshape(both.shape[0], -1)).reshape(*x.shape[:2], both.shape[1], -1)
        keys, values = jnp.split(y, 2, axis=-1)
        return apply(x, queries).reshape(heads), keys, values

    def _own(self, dtype: Any) -> jax.Array:
        """Return the weights of the heads that this rank's queries read, `[d, heads, 2c]`."""
        both, ranks = self.keys_values.get_value().astype(dtype), group_size(self.axis)
        if ranks == 1:
            return both
        here, group = both.shape[1] * self.group // ranks, self.group
        if here % group and group % here:
            raise ValueError(
                f"num_heads={both.shape[1] * group} num_kv_heads={both.shape[1]} over the axis "
                f"{self.axis!r} of size {ranks}: the {here} heads of a rank would read parts of "
                f"several heads of keys, {group} heads each; make the axis a divisor or a multiple "
                f"of {both.shape[1]}"
            )
        first = group_rank(self.axis) * here // group
        return jax.lax.dynamic_slice_in_dim(both, first, max(1, here // group), axis=1)
