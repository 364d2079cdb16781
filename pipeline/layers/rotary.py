"""Rotary positions (J. Su et al., arXiv:2104.09864), and their stretch for long contexts.

Letters: b = sequences, t = positions, h = heads, c = width of a head. Pairs are (i, i + c / 2), as
in the Hugging Face layout of Llama's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """Slows the rotations that a shorter context never completed (Llama 3.1, arXiv:2407.21783).

    Attributes:
      factor: by how much the slow ones are slowed.
      low_freq_factor: turns within the original context below which all of `factor` applies.
      high_freq_factor: turns above which nothing does; smooth between.
      original_max_position_embeddings: the original context.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale `[c / 2]` radians per position."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotary(
    positions: jax.Array, width: int, *, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, `[b, t, 1, c / 2]` float32.

    Args:
      positions: `[b, t]` integers.
      width: c, an even number.
      theta: the base of the wavelengths.
      scaling: how they are stretched, if at all.

    Raises:
      ValueError: c is odd.
    """
    if width % 2:
        raise ValueError(
            f"head_dim={width}: rotary positions turn pairs of numbers, so it must be even"
        )
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    steps = jnp.asarray(frequencies, jnp.float32).reshape(1, 1, 1, -1)
    angles = positions.astype(jnp.float32)[..., None, None] * steps
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn `[b, t, h, c]`; computed in float32, returned in the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
