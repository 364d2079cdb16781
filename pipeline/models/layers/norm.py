"""RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450) of rows.

B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization"; J. L. Ba et al., "Layer
Normalization".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.places.sizes import TENSOR
from pipeline.models.layers.linear import shared


class RMSNorm(nnx.Module):
    """The RMS norm: rows of mean square one, times a scale, `[..., d] -> [..., d]`.

    The scale is equal on all ranks. If the activations of ranks differ (sequence parallelism), its
    gradient is the sum over ranks. JAX takes this sum with every gradient; a pipeline takes it once
    a step. The norm is computed in float32.

    Args:
      width: d.
      epsilon: added to the mean square.
      axis: the mesh axis of the group.
      sequence_parallel: whether ranks have different inputs: parts of the sequence, or heads.
      dtype: the dtype of the scale.
      offset: added to the scale, which then begins as 1 - offset.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-5,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        dtype: Any = jnp.float32,
        offset: float = 0.0,
    ) -> None:
        self.epsilon, self.offset = epsilon, offset
        first = jnp.full(width, 1 - offset, dtype)
        self.scale = shared(first, axis if sequence_parallel else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = _row(self.scale, x)
        if self.offset:
            scale += self.offset
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """The layer norm: rows of mean zero and variance one, times a scale, plus a bias.

    `[..., d] -> [..., d]`. Scale and bias are equal on all ranks, and have gradients like the scale
    of `RMSNorm`. The norm is computed in float32.

    Args:
      width: d.
      epsilon: added to the variance.
      axis: the mesh axis of the group.
      sequence_parallel: the option of `RMSNorm`.
      dtype: the dtype of scale and bias.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = 1e-5,
        axis: str = TENSOR,
        sequence_parallel: bool = False,
        dtype: Any = jnp.float32,
    ) -> None:
        self.epsilon = epsilon
        over = axis if sequence_parallel else None
        self.scale, self.bias = (shared(f(width, dtype), over) for f in (jnp.ones, jnp.zeros))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        unit = wide * jax.lax.rsqrt(variance + self.epsilon)
        return (unit * _row(self.scale, x) + _row(self.bias, x)).astype(x.dtype)


def _row(weight: nnx.Param[Any], x: jax.Array) -> jax.Array:
    """Return a weight `[d]` in the layout of x, in float32."""
    return weight.get_value().astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
