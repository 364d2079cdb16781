"""Gated MLP (N. Shazeer, arXiv:2002.05202): down(silu(gate(x)) * up(x)).

Gate and up are one weight `[d, 2, f]` divided along f. So a rank's part has the same columns of
gate and up. The product with the input is one product, and the gradient for the input is summed
over ranks once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import platform
from collectives.places.sizes import TENSOR
from collectives.tensor import column_input
from pipeline.models.layers.linear import Initializer, RowLinear, make_weight, read_weight, scaled


class SwiGLU(nnx.Module):
    """A gated MLP, `[..., t, d] -> [..., t, d]`; each rank has some of the f hidden columns.

    Args:
      width: d.
      hidden: f.
      rngs: random streams, with a stream ``params``.
      axis: the mesh axis of the group.
      sequence_parallel: whether input and output are this rank's part of the sequence.
      init: the initializer of the fused weight.
      init_out: the initializer of the down weight.
      dtype: the dtype of the parameters.
      bias: whether the gate, up and down layers have biases.
      activation: the activation of the gate.

    Raises:
      ValueError: when called on R ranks, R does not divide f.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        rngs: nnx.Rngs,
        *,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        init: Initializer | None = None,
        init_out: Initializer | None = None,
        dtype: Any = jnp.float32,
        bias: bool = False,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ) -> None:
        self.activation = activation
        self.axis, self.sequence_axis = axis, -2 if sequence_parallel else None
        pieces = "hidden", hidden, None
        make = functools.partial(make_weight, rngs, dtype=dtype, axis=axis, pieces=pieces)
        self.gate_up = make((width, 2, hidden), init=init or scaled(width), dim=2)
        zeros = jax.nn.initializers.zeros
        self.gate_up_bias = make((2, hidden), init=zeros, dim=1) if bias else None
        more: dict[str, Any] = {"bias": bias, "axis": axis, "dtype": dtype, "pieces": pieces}
        more |= {"sequence_parallel": sequence_parallel, "init": init_out}
        self.down = RowLinear(hidden, width, rngs, **more)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the whole output, or this rank's part of the sequence."""
        weight = read_weight(self.gate_up, x, self.axis)
        x = column_input(x, self.axis, sequence_axis=self.sequence_axis)
        # The columns stay two dims: if the compiler divides them, it would exchange flat columns.
        both = jnp.einsum("td,dcf->tcf", x.reshape(-1, x.shape[-1]), weight)
        if self.gate_up_bias is not None:
            both += read_weight(self.gate_up_bias, x, self.axis)[None]
        hidden = self.activation(both[:, 0]) * both[:, 1]
        if platform() == "tpu":
            # Without the barrier, every tile of the products that read it forms it again: in 8B on
            # v5p
            # these products then take 1.6 times as long as alone (bench/notes/tpu.md).
            hidden = jax.lax.optimization_barrier(hidden)
        return self.down(hidden.reshape(*x.shape[:-1], -1))


def fuse_gate_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Fuse two weights `[d, f]` of other formats into one weight `[d, 2, f]`."""
    return jnp.stack([gate, up], axis=1)
