"""Root-mean-square norm (B. Zhang and R. Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.sizes import TENSOR
from pipeline.layers.weights import shared


class RMSNorm(nnx.Module):
    """Rows of mean square one, times a scale: `[..., d] -> [..., d]`.

    The scale is the same on all ranks. Where their activations differ (sequence parallelism) its
    gradient is the sum of theirs: JAX takes it whenever there is a gradient, a pipeline that is
    told of it once a step. Computed in float32.

    Args:
      width: d.
      epsilon: added to the mean square.
      axis: the mesh axis of the group.
      sequence_parallel: whether the input is this rank's part of the sequence.
      dtype: of the scale.
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
        self.scale = shared(jnp.ones(width, dtype), axis if sequence_parallel else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """In the dtype of the input."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = self.scale.get_value().astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)
