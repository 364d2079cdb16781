"""Slices of sequences, as a stage sees them that is called on one of them.

Letters: N slices of a sequence, b rows, t positions of a slice, T = N t of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SequenceSlice:
    """The place of a slice in its sequence: what ``call_slice(x, earlier, part)`` is given.

    Attributes:
      index: its number, 0..N-1, an int32 scalar that may be traced.
      count: N.
    """

    index: Any
    count: int = field(metadata={"static": True})

    def places(self, t: int) -> jax.Array:
        """`[t]` the places of the slice's positions in the whole sequence."""
        return self.index * t + jnp.arange(t)

    def join(self, own: jax.Array, earlier: jax.Array | None) -> jax.Array:
        """Join values of this slice and of earlier ones along positions: `[b, T, ...]`.

        Places of later slices hold zeros. A causal mask hides them.

        Args:
          own: `[b, t, ...]`.
          earlier: `[N, b, t, ...]`, what earlier slices left, zeros from this one on; None for a
            sequence in one piece, which is returned as it is.
        """
        if earlier is None:
            return own
        # A choice, and no write at an index: it is as cheap to compute again in a backward.
        is_own = (jnp.arange(self.count) == self.index).reshape(-1, *[1] * own.ndim)
        whole = jnp.moveaxis(jnp.where(is_own, own[None], earlier), 0, 1)
        return whole.reshape(own.shape[0], -1, *own.shape[2:])


jax.tree_util.register_dataclass(SequenceSlice)
WHOLE_SEQUENCE = SequenceSlice(0, 1)
