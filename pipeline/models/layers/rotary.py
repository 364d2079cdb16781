"""Rotary positions (J. Su et al., arXiv:2104.09864), and their scaling for long contexts.

Letters: b = sequences, t = positions, h = heads, c = width of a head. Pairs are (i, i + c / 2), as
in Hugging Face's layout of Llama's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Scaling(Protocol):
    """The rule that stretches the wavelengths of rotary positions."""

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Scale `[c / 2]` radians per position."""
        ...


@dataclass(frozen=True)
class RopeScaling:
    """Slow down rotations that a shorter context never completed (Llama 3.1, arXiv:2407.21783).

    Attributes:
      factor: the factor by which slow rotations are slowed down.
      low_freq_factor: turns within the original context below which all of `factor` applies.
      high_freq_factor: turns above which rotations stay unchanged; smooth between the two.
      original_max_position_embeddings: the original context.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """Slow down all rotations equally (S. Chen et al., arXiv:2306.15595).

    Attributes:
      factor: the factor by which rotations are slowed down.
    """

    factor: float

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Slow down slow rotations, and make queries and keys larger (YaRN, arXiv:2309.00071).

    Attributes:
      factor: the factor by which slow rotations are slowed down.
      original_max_position_embeddings: the original context.
      beta_fast: turns within the original context from which on a rotation stays unchanged.
      beta_slow: turns up to which all of `factor` applies. Between the two limits the share of
        `factor` is linear in the index of the pair.
      attention_factor: the factor of queries and keys; None for 1 + ln(factor) / 10.
      truncate: whether the ends of that linear range are rounded to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """The factor of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        pairs = len(frequencies)
        # A pair's index follows from its turns: frequencies are a geometric sequence from 1.
        step = -math.log(frequencies[1]) if pairs > 1 else 1.0

        def pair_of(turns: float) -> float:
            length = self.original_max_position_embeddings / (2 * math.pi * turns)
            return math.log(length) / step

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        slowed = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return frequencies * (1 - slowed + slowed / self.factor)


def rotary(
    positions: jax.Array, width: int, *, theta: float = 10000.0, scaling: Scaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute cosine and sine of every position's angles, `[b, t, 1, c / 2]` float32.

    Args:
      positions: `[b, t]` integers.
      width: c, an even number.
      theta: the base of the wavelengths.
      scaling: the scaling of the wavelengths; None for no scaling.

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
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(scaling, YarnScaling):
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `[b, t, h, c]`; compute in float32, return the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
