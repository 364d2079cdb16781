"""Root-mean-square norm (B. Zhang and R. Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """Rows of mean square one, times a scale: `[..., d] -> [..., d]`.

    The scale is the same on all ranks. Where their activations differ (sequence parallelism) its
    gradient is summed over them, which JAX does by itself. Computed in float32.

    Args:
      width: d.
      epsilon: added to the mean square.
      dtype: of the scale.
    """

    def __init__(self, width: int, *, epsilon: float = 1e-5, dtype: Any = jnp.float32) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """In the dtype of the input."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = self.scale.get_value().astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)
