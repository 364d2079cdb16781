"""Windows: whole weights, and whole gradients, of the chunks that a rank works on.

Letters: V chunks. Devices store parts of both. Which chunk is in which window when, the program
says (`schedules.lowering.windows`): chunk 0 from the start. Jobs beside actions gather the weights
of the next chunk, and reduce the gradients of the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collectives import STAGE
from pipeline.base.tree import Leaves
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.placement.zero import shares_weight
from pipeline.core.step.stores.device import unwritten
from pipeline.core.step.stores.totals import refs_in_windows
from pipeline.core.step.stores.weights import ChunkWeights
from schedules.lowering.needs import last_in_windows
from schedules.lowering.program import Job, Program


class Windows:
    """Places for the whole weights that data shards share, in the dtype in which they are gathered.

    They are open while a program runs. Chunks of one window whose weights have other shapes or
    dtypes, or vary over other axes, have arrays of their own.
    """

    def __init__(self) -> None:
        self._weights: Any = None
        self._refs: list[Leaves] = []  # [V] None for what is whole on every shard

    @property
    def are_open(self) -> bool:
        """True if actions find their weights here."""
        return bool(self._refs)

    def open(self, weights: ChunkWeights, axes: tuple[str, ...], places: Sequence[int]) -> None:
        """Make places for a program, with chunk 0 in its own.

        Args:
          weights: of the rank's chunks.
          axes: the mesh axes over which they vary.
          places: [V] the window of each chunk.
        """
        self._weights, chunks = weights, range(len(places))
        types = [jax.eval_shape(lambda v=v: weights.gathered(v, 0)) for v in chunks]
        shared = [list(map(shares_weight, weights.spreads[v])) for v in chunks]

        def first(chunk: int) -> Leaves:
            return weights.gathered(0, 0) if chunk == 0 else unwritten(types[chunk], axes)

        self._refs = refs_in_windows(places, types, shared, first)

    def close(self) -> None:
        """End the program: from now on whoever reads weights gathers them."""
        self._weights, self._refs = None, []

    def read(self, chunk: int) -> Leaves:
        """The weights of a chunk that is in its window."""
        pairs = zip(self._refs[chunk], self._weights.to_gather(chunk), strict=True)
        return [leaf if ref is None else tiled(ref[...]) for ref, leaf in pairs]

    def write(self, chunk: int, weights: Leaves) -> None:
        """Put the weights of a chunk into its window."""
        for ref, leaf in zip(self._refs[chunk], weights, strict=True):
            if ref is not None:
                ref[...] = tiled(leaf)


def start(
    job: Job, weights: ChunkWeights, totals: Sequence[Any], microbatch: Any
) -> Callable[[], None]:
    """Start a job beside an action; the result ends it, behind the action's own products.

    Args:
      job: what to do.
      weights: of the rank's chunks.
      totals: [V] of their gradients.
      microbatch: that of the action.
    """
    if job.name == "gather":
        whole = weights.gathered(job.chunk, microbatch)
        return lambda: weights.windows.write(job.chunk, whole)
    total = totals[job.chunk].whole
    parts = total.shared_out()

    def end() -> None:
        total.keep(parts)
        total.leave()

    return end


@contextlib.contextmanager
def in_windows(
    weights: ChunkWeights, totals: Sequence[Any], axes: tuple[str, ...], program: Program
) -> Iterator[None]:
    """Run a program's ticks with the windows that it has; then share out what they still hold."""
    if program.windows is None:
        yield
        return
    weights.windows.open(weights, axes, program.windows.weights)
    yield
    weights.windows.close()
    rank = jax.lax.axis_index(STAGE)
    for chunk, on_ranks in last_in_windows(program).items():
        is_there: Any = True if all(on_ranks) else jnp.asarray(on_ranks)[rank]
        totals[chunk].keep(totals[chunk].shared_out(is_there))
