"""Slices of sequences, as a stage gets them in a call.

Letters: N slices of a sequence, b rows, t positions of a slice, T of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SequenceSlice:
    """The place of a slice in its sequence: the argument ``part`` of ``call_slice``.

    Attributes:
      index: the slice's number, 0..N-1, an int32 scalar that may be traced.
      count: N.
    """

    index: Any
    count: int = field(metadata={"static": True})

    def start(self, t: int) -> Any:
        """Return the place of the slice's first position in the whole sequence."""
        return self.index * t

    def length(self, t: int) -> int:
        """Return the number of positions of the whole sequence; the slice has t."""
        return self.count * t

    def places(self, t: int) -> jax.Array:
        """Return `[t]` the places of the slice's positions in the whole sequence."""
        return self.start(t) + jnp.arange(t)

    def join(self, own: jax.Array, earlier: jax.Array | None) -> jax.Array:
        """Join values of this slice and of earlier slices along positions: `[b, T, ...]`.

        Places of later slices contain zeros, which a causal mask hides.

        Args:
          own: `[b, t, ...]`.
          earlier: `[N, b, t, ...]`, the values of earlier slices, zeros for this slice and later
            ones; None for a whole sequence, which is returned unchanged.
        """
        if earlier is None:
            return own
        # A select and no write at an index, because a select is cheap to recompute in a backward.
        is_own = (jnp.arange(self.count) == self.index).reshape(-1, *[1] * own.ndim)
        whole = jnp.moveaxis(jnp.where(is_own, own[None], earlier), 0, 1)
        return whole.reshape(own.shape[0], -1, *own.shape[2:])


@dataclass(frozen=True)
class FixedSlice(SequenceSlice):
    """The place of a slice whose number is known when a stage is traced (``slices=(t0, t1, ...)``).

    Attributes:
      index: the slice's number, an integer.
      lengths: [N] positions of all slices.
    """

    index: int = field(metadata={"static": True})
    count: int = field(metadata={"static": True})
    lengths: tuple[int, ...] = field(metadata={"static": True})

    def start(self, t: int) -> int:
        """Return the place of the first position; t may be a rank's share of the slice."""
        return sum(self.lengths[: self.index]) * t // self.lengths[self.index]

    def length(self, t: int) -> int:
        """Return the number of positions of the whole sequence; the slice has t."""
        return sum(self.lengths) * t // self.lengths[self.index]

    def join(self, own: jax.Array, earlier: jax.Array | None) -> jax.Array:
        """Join values of this slice and of earlier slices, s positions: `[b, s, ...]`.

        Args:
          own: `[b, t, ...]`.
          earlier: `[N, b, u, ...]`, the values of slices, padded to the u positions of the longest.
        """
        if earlier is None:
            return own
        t, mine = own.shape[1], self.lengths[self.index]
        before = self.lengths[: self.index]
        parts = [earlier[n][:, : t * length // mine] for n, length in enumerate(before)]
        return jnp.concatenate([*parts, own], axis=1)


jax.tree_util.register_dataclass(SequenceSlice)
jax.tree_util.register_dataclass(FixedSlice)
WHOLE_SEQUENCE = SequenceSlice(0, 1)
