"""Masks of trained leaves, over the parameters of stages and of chunks.

Letters: K stages, V chunks. Stages of one chunk share their arrays, so an array has a gradient if
it is trained for any stage. In the kernel, stages with different masks have different code
(`pipeline.core.step.calls.kind`), which adds nothing to the gradients of frozen parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pipeline.base.masks import Mask, Needs, NeedsGradient


@jax.tree_util.register_static
@dataclass(frozen=True)
class Trained:
    """The leaves of a pipeline's parameters that have gradients.

    Attributes:
      stages: [K] masks of the leaves of each stage's parameters.
      chunks: [V] masks of the leaves of each chunk's parameters: trained for any stage.
      ends: the mask of the leaves of the ends' parameters, with embed's leaves first.
      num_embed: the number of embed's leaves.
    """

    stages: tuple[Mask, ...]
    chunks: tuple[Mask, ...]
    ends: Mask
    num_embed: int

    def restrict(
        self, chunks: tuple[Mask, ...], ends: Mask, cells: Sequence[tuple[int, Sequence[int]]]
    ) -> Trained:
        """Restrict to the arrays whose gradients are wanted.

        Args:
          chunks: [V] masks of each chunk's parameters.
          ends: the mask of the ends' parameters.
          cells: [K] for each stage its chunk, and the indices of the chunk's leaves that store the
            stage's leaves.
        """

        def both(mask: Mask, other: Sequence[bool]) -> Mask:
            return tuple(a and b for a, b in zip(mask, other, strict=True))

        of_stages = [[chunks[v][cell] for cell in own] for v, own in cells]
        return Trained(
            tuple(map(both, self.stages, of_stages)),
            tuple(map(both, self.chunks, chunks)),
            both(self.ends, ends),
            self.num_embed,
        )

    @property
    def embed(self) -> bool:
        return any(self.ends[: self.num_embed])

    @property
    def is_anything(self) -> bool:
        return any(map(any, (*self.chunks, self.ends)))

    def needs_gradients(self, *, want_inputs: bool) -> Needs:
        """Find the gradients that each of the K stages' backward computes.

        For its input, stage 0 gets the flag of stage 1, so that the two can share code. The code
        that runs stage 0 knows that it is the first.
        """
        before = want_inputs or self.embed
        return tuple(
            NeedsGradient(mask, x=before or any(map(any, self.stages[: max(k, 1)])))
            for k, mask in enumerate(self.stages)
        )
