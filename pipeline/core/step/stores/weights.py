"""The weights of a rank's chunks: the stored shards, and the whole weights that stages read.

Letters: V chunks. With FSDP each data shard stores a part of a chunk's weights. The weights are
gathered once for the step, or by every action, or for a run of actions in a window
(`WeightWindows`). A leaf that stages read only in a narrower dtype is read from a narrow copy
(`pipeline.core.step.open`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pipeline.base.tree import Leaves, vary_like
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.autodiff.jaxpr.primitives import barrier
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import gather, gathered_dim
from pipeline.core.step.stores.windows import WeightWindows


@dataclass(frozen=True, eq=False)
class ChunkWeights:
    """The parameters of a rank's chunks.

    A trace of a stage outside of all actions has no microbatch. No window is open for it: it
    gathers, and XLA drops the result.

    Attributes:
      shards: [V] the leaves as this device stores them.
      spreads: [V] the placement of each leaf.
      ready: [V] the leaves made once a step (`make_ready`), from which actions read; before that
        empty.
      is_whole: whether leaves of ``ready`` are whole; else actions gather them, except weights that
        a window holds whole.
      windows: places for whole weights, open while a program with windows runs.
    """

    shards: Sequence[Leaves]
    spreads: Sequence[Sequence[Spread]]
    ready: Sequence[Leaves] = ()
    is_whole: bool = False
    windows: WeightWindows = field(default_factory=WeightWindows)

    def make_ready(
        self,
        *,
        gathers: bool,
        dtypes: Sequence[Sequence[Any]] | None = None,
        made: Mapping[str, Leaves] | None = None,
    ) -> ChunkWeights:
        """Cast leaves once a step to the ``dtypes`` that are not None, and gather them or not.

        If an earlier program has done this, ``made`` has its results.
        """

        def make(v: int, n: int) -> Any:
            leaf, dtype = self.shards[v][n], None if dtypes is None else dtypes[v][n]
            if made is not None:
                return made.get(f"ready{v}.{n}", [leaf])[0]
            narrow = contextlib.nullcontext() if dtype is None else jax.named_scope(scopes.CASTS)
            with narrow:  # cast before the gather: half the bytes on the wire
                leaf = leaf if dtype is None else leaf.astype(dtype)
                return gather([leaf], [self.spreads[v][n]], lead=1)[0] if gathers else leaf

        ready = [[make(v, n) for n in range(len(of))] for v, of in enumerate(self.shards)]
        return dataclasses.replace(self, ready=ready, is_whole=gathers)

    @property
    def made(self) -> dict[str, Leaves]:
        """The leaves of ``ready`` that are not those that the device stores, by chunk and leaf."""
        return {
            f"ready{v}.{n}": [made]
            for v, of in enumerate(zip(self.ready, self.shards, strict=True))
            for n, (made, stored) in enumerate(zip(*of, strict=True))
            if made is not stored
        }

    def whole(self, chunk: int) -> Leaves:
        """Return a chunk's whole leaves, in the stored dtype."""
        stored, ready = self.shards[chunk], self.to_gather(chunk)
        if self.is_whole and [x.dtype for x in ready] == [x.dtype for x in stored]:
            return ready
        return gather(stored, self.spreads[chunk], lead=1)

    def read(self, chunk: int, microbatch: Any) -> tuple[Leaves, Leaves]:
        """Return a chunk's whole leaves for an action, and the narrow copy of each leaf or None."""
        stored, leaves = self.shards[chunk], self.to_gather(chunk)
        if not self.is_whole:
            in_window = self.windows.are_open and microbatch is not None
            leaves = self.windows.read(chunk) if in_window else self.gathered(chunk, microbatch)
        pairs = list(zip(leaves, stored, strict=True))
        # A stage is a function of wide leaves and has gradients for them. If a leaf has a copy, the
        # stage reads the copy, so compilers drop this cast back to the wide dtype.
        with jax.named_scope(scopes.UNREAD):
            wide = [w if x.shape == w.shape else x.astype(w.dtype) for x, w in pairs]
        return wide, [x if x.dtype != w.dtype else None for x, w in pairs]

    def to_gather(self, chunk: int) -> Leaves:
        """Return the leaves from which actions read, before they gather any."""
        return (self.ready or self.shards)[chunk]

    def gathered(self, chunk: int, microbatch: Any) -> Leaves:
        """Gather a chunk's leaves; the result has the dtype of the gather."""
        shards = self.to_gather(chunk)
        if microbatch is not None:
            # The operands of the gather are equal in every tick, so XLA would move it out of the
            # loop and keep the result. A barrier makes it depend on the microbatch of the tick.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        return gather(shards, self.spreads[chunk], lead=1)


def gather_ends(leaves: Leaves, spreads: Sequence[Spread], made: Mapping[str, Leaves]) -> Leaves:
    """Gather the leaves of embed and head; ``made`` has those that an earlier program gathered."""
    whole = gather(leaves, spreads)
    return [made.get(f"readyends.{n}", [x])[0] for n, x in enumerate(whole)]


def gathered_ends(leaves: Leaves, spreads: Sequence[Spread]) -> dict[str, Leaves]:
    """Select the leaves from `gather_ends` that data shards divide, by name."""
    return {
        f"readyends.{n}": [x]
        for n, (x, spread) in enumerate(zip(leaves, spreads, strict=True))
        if gathered_dim(spread) is not None
    }
