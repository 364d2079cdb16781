"""Masks of trained leaves, over the parameters of stages and of chunks.

Letters: K stages, V chunks. Stages of one chunk share their arrays, so an array has a gradient if
any of its stages is trained in it. In the kernel stages that are not trained alike have code of
their own (`pipeline.core.step.calls.groups`), which adds nothing to the sums of what is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.base.masks import Mask, Needs, NeedsGradient


@jax.tree_util.register_static
@dataclass(frozen=True)
class Trained:
    """The leaves of a pipeline's parameters that have gradients.

    Attributes:
      stages: [K] for the leaves of each stage's own parameters.
      chunks: [V] for the leaves of each chunk's, whether any stage is trained in them.
      ends: for the leaves of embed's and the head's.
      num_embed: how many of them, the first, are embed's.
    """

    stages: tuple[Mask, ...]
    chunks: tuple[Mask, ...]
    ends: Mask
    num_embed: int

    def restrict(
        self, chunks: tuple[Mask, ...], ends: Mask, cells: Sequence[tuple[int, Any]]
    ) -> Trained:
        """Restrict to the leaves of the arrays whose gradients are asked for.

        Args:
          chunks: [V] which leaves of each chunk's parameters.
          ends: which of embed's and the head's.
          cells: [K] the chunk of each stage, and among which of its leaves the stage's own lie;
            None where they are those.
        """

        def both(mask: Mask, other: Sequence[bool]) -> Mask:
            return tuple(a and b for a, b in zip(mask, other, strict=True))

        of_stages = [
            chunks[v] if own is None else [chunks[v][cell] for cell in own] for v, own in cells
        ]
        return Trained(
            tuple(map(both, self.stages, of_stages)),
            tuple(map(both, self.chunks, chunks)),
            both(self.ends, ends),
            self.num_embed,
        )

    @property
    def embed(self) -> bool:
        """True if anything of embed is trained."""
        return any(self.ends[: self.num_embed])

    @property
    def is_anything(self) -> bool:
        """True if anything is trained."""
        return any(map(any, (*self.chunks, self.ends)))

    def needs_gradients(self, *, want_inputs: bool, backward: bool = True) -> Needs:
        """[K] how far each stage's backward goes.

        Stage 0 is as stage 1 is, whose code it may share; where it runs, it is known to be first.

        Args:
          want_inputs: whether inputs have gradients.
          backward: whether anything goes back at all; otherwise all stages are alike.
        """
        if not backward:
            return tuple(NeedsGradient((True,) * len(mask), x=True) for mask in self.stages)
        before = want_inputs or self.embed
        return tuple(
            NeedsGradient(mask, x=before or any(map(any, self.stages[: max(k, 1)])))
            for k, mask in enumerate(self.stages)
        )
