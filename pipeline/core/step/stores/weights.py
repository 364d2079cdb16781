"""The weights of a rank's chunks: the stored shards, and the whole weights that stages read.

Letters: V chunks. With FSDP each data shard stores a part of a chunk's weights. The weights are
gathered once for the step, or by every action, or for a run of actions in a window
(`WeightWindows`). A leaf that stages read only in a narrower dtype has a narrow copy
(`pipeline.core.step.casts`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pipeline.base.tree import Leaves, Tree, vary_like
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.autodiff.jaxpr.primitives import barrier
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import gather
from pipeline.core.step.stores.windows import WeightWindows


class Lazy(Sequence[Any]):
    """A list whose elements are made on access, and so within the branch that reads them."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)


@dataclass(frozen=True, eq=False)
class ChunkWeights:
    """The parameters of a rank's chunks.

    In a tick the index of a microbatch is an array. A call with a Python integer is only traced for
    its types, before the first tick, when no window is open: it gathers, and XLA drops the result.

    Attributes:
      params: [V] trees of parameters, or of their shards if actions gather them.
      spreads: [V] the placement of each leaf.
      gathers: whether actions gather weights, except weights that a window holds whole.
      before_step: [V] the shards, if the leaves were gathered for the step; else empty.
      narrow: [V] the narrow copy of each leaf, or None; a copy is sharded if actions gather leaves.
        Empty if no leaf has a copy.
      windows: places for whole weights, open while a program with windows runs.
    """

    params: Sequence[Tree]
    spreads: Sequence[Sequence[Spread]]
    gathers: bool = False
    before_step: Sequence[Leaves] = ()
    narrow: Sequence[Leaves] = ()
    windows: WeightWindows = field(default_factory=WeightWindows)

    @functools.cached_property
    def shards(self) -> list[Leaves]:
        """[V] the leaves of `params`."""
        return [jax.tree.leaves(params) for params in self.params]

    @functools.cached_property
    def whole(self) -> Sequence[Leaves]:
        """[V] the whole leaves, in the stored dtype."""
        shards = self.shards
        if not self.gathers:
            return shards
        return Lazy(len(shards), lambda chunk: self._gathered(shards[chunk], chunk, 0))

    def read(self, chunk: int, microbatch: Any) -> tuple[Leaves, Leaves]:
        """Return a chunk's whole leaves for an action, and the narrow copy of each leaf or None."""
        shards = self.shards[chunk]
        narrow = self.narrow[chunk] if self.narrow else [None] * len(shards)
        if self.gathers:
            # With a Python integer the call is traced for its types, and no window may be open.
            in_window = self.windows.are_open and not isinstance(microbatch, int)
            whole = self.windows.read(chunk) if in_window else self.gathered(chunk, microbatch)
            narrow = [None if n is None else x for n, x in zip(narrow, whole, strict=True)]
        elif self.before_step:
            whole = self.to_gather(chunk)
        else:
            return shards, narrow
        # A stage is a function of wide leaves and has gradients for them. If a leaf has a copy, the
        # stage reads the copy, so compilers drop this cast back to the wide dtype.
        with jax.named_scope(scopes.UNREAD):
            return [x.astype(w.dtype) for x, w in zip(whole, shards, strict=True)], narrow

    def to_gather(self, chunk: int) -> Leaves:
        """Return a chunk's leaves before the gather: for each leaf its narrow copy, if any."""
        shards = self.shards[chunk]
        if not self.narrow:
            return shards
        pairs = zip(shards, self.narrow[chunk], strict=True)
        return [w if n is None else n for w, n in pairs]

    def gathered(self, chunk: int, microbatch: Any) -> Leaves:
        """Gather a chunk's leaves; the result has the dtype of the gather."""
        return self._gathered(self.to_gather(chunk), chunk, microbatch)

    def _gathered(self, shards: Leaves, chunk: int, microbatch: Any) -> Leaves:
        if not isinstance(microbatch, int):
            # The operands of the gather are equal in every tick, so XLA would move it out of the
            # loop and keep the result. A barrier makes it depend on the microbatch of the tick.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        return gather(shards, self.spreads[chunk], lead=1)
