"""A rank's windows: whole weights of the chunks that it works on, where devices store parts.

Letters: V chunks. Which chunk is in which window when, the program says
(`schedules.lowering.windows`): chunk 0 from the start, the others are gathered beside an action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE
from pipeline.base.tree import Leaves
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.placement.zero import shares_weight
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.stores.device import Memory, unwritten
from pipeline.core.step.stores.totals import refs_in_windows
from schedules.lowering.needs import last_in_windows
from schedules.lowering.program import Program


class Windows:
    """Places for the whole weights that data shards share, in the dtype in which they are gathered.

    They are open while a program runs. Chunks of one window whose weights have other shapes or
    dtypes, or vary over other axes, have arrays of their own.
    """

    def __init__(self) -> None:
        self._rank: Any = None
        self._refs: list[Leaves] = []  # [V] None for what is whole on every shard

    @property
    def are_open(self) -> bool:
        """True if actions find their weights here."""
        return bool(self._refs)

    def open(self, rank: Rank, places: Sequence[int]) -> None:
        """Make places for a program, with chunk 0 in its own.

        Args:
          rank: what the rank holds.
          places: [V] the window of each chunk.
        """
        self._rank, chunks = rank, range(len(places))
        types = [jax.eval_shape(lambda v=v: rank.chunks.gathered(v, 0)) for v in chunks]
        shared = [list(map(shares_weight, rank.model.layout.chunks[v])) for v in chunks]

        def first(chunk: int) -> Leaves:
            return rank.chunks.gathered(0, 0) if chunk == 0 else unwritten(types[chunk], rank.axes)

        self._refs = refs_in_windows(places, types, shared, first)

    def close(self) -> None:
        """End the program: from now on whoever reads weights gathers them."""
        self._rank, self._refs = None, []

    def read(self, chunk: int) -> Leaves:
        """The weights of a chunk that is in its window."""
        pairs = zip(self._refs[chunk], self._rank.chunks.to_gather(chunk), strict=True)
        return [leaf if ref is None else tiled(ref[...]) for ref, leaf in pairs]

    def write(self, chunk: int, weights: Leaves) -> None:
        """Put the weights of a chunk into its window."""
        for ref, leaf in zip(self._refs[chunk], weights, strict=True):
            if ref is not None:
                ref[...] = tiled(leaf)


@contextlib.contextmanager
def in_windows(rank: Rank, memory: Memory, program: Program) -> Iterator[None]:
    """Run a program's ticks with the windows that it has; then share out what they still hold."""
    if program.windows is None:
        yield
        return
    rank.chunks.windows.open(rank, program.windows.weights)
    yield
    rank.chunks.windows.close()
    index = jax.lax.axis_index(STAGE)
    for chunk, on_ranks in last_in_windows(program).items():
        is_there: Any = True if all(on_ranks) else jnp.asarray(on_ranks)[index]
        total = memory.chunk_grads[chunk]
        total.keep(total.shared_out(is_there))
