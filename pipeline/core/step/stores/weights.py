"""The weights of a rank's chunks: parts as devices store them, and whole as stages read them.

Letters: V chunks. Where data shards store parts (FSDP), a chunk's weights are made whole once for
the step, or by every action, or for a run of actions in a window (`WeightWindows`). Narrow copies
are of leaves that stages read in a narrower dtype alone (`pipeline.core.step.casts`).
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
    """A list whose elements are made when they are read, so within the branch that reads them."""

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
      params: [V] trees of parameters; of their shards, if actions gather them.
      spreads: [V] where each of their leaves is stored.
      gathers: whether an action gathers weights, unless a window has them whole.
      before_step: [V] the leaves before they were gathered for the step; empty if they were not.
      narrow: [V] narrow copies of leaves, None for leaves without one; sharded as leaves are if
        actions gather them. Empty if there are none.
      windows: places for whole weights, open while a program runs that has some.
    """

    params: Sequence[Tree]
    spreads: Sequence[Sequence[Spread]]
    gathers: bool = False
    before_step: Sequence[Leaves] = ()
    narrow: Sequence[Leaves] = ()
    windows: WeightWindows = field(default_factory=WeightWindows)

    @functools.cached_property
    def shards(self) -> list[Leaves]:
        """[V] leaves, as they are stored."""
        return [jax.tree.leaves(params) for params in self.params]

    @functools.cached_property
    def whole(self) -> Sequence[Leaves]:
        """[V] leaves, whole, in the dtype in which they are stored."""
        shards = self.shards
        if not self.gathers:
            return shards
        return Lazy(len(shards), lambda chunk: self._gathered(shards[chunk], chunk, 0))

    def read(self, chunk: int, microbatch: Any) -> tuple[Leaves, Leaves]:
        """Read a chunk's whole leaves for an action, and their narrow copies, None without one."""
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
        # A stage is a function of wide leaves, whose gradients it has, but the numbers of a leaf
        # with a copy are read from the copy: compilers drop the cast back.
        with jax.named_scope(scopes.UNREAD):
            return [x.astype(w.dtype) for x, w in zip(whole, shards, strict=True)], narrow

    def to_gather(self, chunk: int) -> Leaves:
        """A chunk's leaves before they are gathered; of a leaf with a narrow copy, the copy."""
        shards = self.shards[chunk]
        if not self.narrow:
            return shards
        pairs = zip(shards, self.narrow[chunk], strict=True)
        return [w if n is None else n for w, n in pairs]

    def gathered(self, chunk: int, microbatch: Any) -> Leaves:
        """A chunk's leaves, whole, in the dtype in which they are gathered."""
        return self._gathered(self.to_gather(chunk), chunk, microbatch)

    def _gathered(self, shards: Leaves, chunk: int, microbatch: Any) -> Leaves:
        if not isinstance(microbatch, int):
            # The gather has the same operands in every tick, so XLA would move it out of the loop
            # and keep the result. A barrier ties it to the microbatch of the tick.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        return gather(shards, self.spreads[chunk], lead=1)
