"""Dropout with the same mask for any split of the activation over ranks.

Letters: R = ranks on the axis, t = positions, d = width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives.compat import varying_axes
from collectives.places.sizes import TENSOR
from collectives.tensor import group_rank


class Dropout(nnx.Dropout):
    """Dropout: `[..., t, d] -> [..., t, d]`; some numbers become zero, the others are scaled up.

    Every place along one dim has its own key, made from its index in the whole activation. A rank
    that holds some of the places (sequence parallelism, or columns between a column and a row
    layer) computes only the mask of these places. Ranks that hold all places compute the same mask.

    Args:
      rate: the share of numbers that become zero.
      rngs: random streams, with a stream ``dropout``.
      dim: the dim that may be split over ranks: -2, the sequence, or -1 between a column layer and
        its row layer.
      axis: the mesh axis of the group.
      deterministic: whether no number becomes zero, as after ``module.eval()``.
    """

    def __init__(
        self,
        rate: float,
        rngs: nnx.Rngs,
        *,
        dim: int = -2,
        axis: str = TENSOR,
        deterministic: bool = False,
    ) -> None:
        super().__init__(rate, deterministic=deterministic, rngs=rngs)
        self.dim, self.axis = dim, axis
        stream: Any = self.rngs
        stream.key.set_metadata(alike=True)  # `pipeline.core.model.randomness` reads it

    def __call__(  # type: ignore[override]
        self, x: jax.Array, *, deterministic: bool | None = None
    ) -> jax.Array:
        """Apply dropout, unless deterministic."""
        off = self.deterministic if deterministic is None else deterministic
        if off or self.rate == 0:
            return x
        if self.rate == 1:  # avoid 0 / 0
            return jnp.zeros_like(x)
        stream: Any = self.rngs
        key, size, keep = stream(), x.shape[self.dim], 1 - self.rate
        start = group_rank(self.axis) * size if self.axis in varying_axes(x) else 0
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, start + jnp.arange(size))
        rest = jnp.moveaxis(x, self.dim, 0).shape[1:]
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, keep, rest))(keys)
        kept = jnp.moveaxis(kept, 0, self.dim)
        return jnp.where(kept, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))
