"""Meshes of ranks that are not alike."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh


def meshes_of(*sizes: dict[str, int]) -> list[Mesh]:
    """[S] meshes with these axes, each of devices of its own."""
    ends = np.cumsum([math.prod(of.values()) for of in sizes])
    parts = np.split(np.asarray(jax.devices()[: ends[-1]]), ends[:-1])
    shaped = (part.reshape(tuple(of.values())) for part, of in zip(parts, sizes, strict=True))
    return [Mesh(part, tuple(of)) for part, of in zip(shaped, sizes, strict=True)]
