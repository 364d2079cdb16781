"""Windows: buffers for whole weights and whole gradients of the chunks that a rank works on.

Letters: V chunks. Devices store parts of weights and gradients. The program decides when a window
holds a chunk (`schedules.lowering.windows`); chunk 0 is in its window from the start. Jobs that run
during other actions gather the weights of the next chunk, and reduce the gradients of the previous
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, vary_like
from pipeline.core.autodiff.jaxpr.primitives import barrier
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import reduce_parts, scatter, shares_gradient, shares_weight
from pipeline.core.step.stores.device import unwritten
from pipeline.core.step.stores.totals import Total
from schedules.lowering.program import Job
from schedules.lowering.windows import Windows


class WeightWindows:
    """Windows for whole weights that data shards share, in the dtype of the gather.

    Windows are open while a program runs. Chunks of one window have separate arrays if their
    weights differ in shapes, dtypes or the axes over which they vary.
    """

    def __init__(self) -> None:
        self._weights: Any = None
        self._refs: list[Leaves] = []  # [V] None for a leaf that every shard stores whole

    @property
    def are_open(self) -> bool:
        """True if actions read their weights from windows."""
        return bool(self._refs)

    def open(self, weights: Any, axes: tuple[str, ...], places: Sequence[int]) -> None:
        """Make a program's windows, and fill chunk 0's; ``places`` is [V] each chunk's window."""
        # Chunk 0 is gathered before the first tick, since a job can only serve a later action. The
        # other windows start uninitialised: a gather writes them before they are read.
        self._weights, chunks = weights, range(len(places))
        types = [jax.eval_shape(lambda v=v: weights.gathered(v, None)) for v in chunks]
        shared = [list(map(shares_weight, weights.spreads[v])) for v in chunks]

        def first(chunk: int) -> Leaves:
            return weights.gathered(0, None) if chunk == 0 else unwritten(types[chunk], axes)

        self._refs = refs_in_windows(places, types, shared, first)

    def close(self) -> None:
        """Close the windows at the end of a program: later reads of weights gather."""
        self._weights, self._refs = None, []

    def read(self, chunk: Any) -> Leaves:
        # Every data shard stores a leaf whole that the shards cannot share; it is in no window.
        pairs = zip(self._refs[chunk], self._weights.to_gather(chunk), strict=True)
        return [leaf if ref is None else tiled(ref[...]) for ref, leaf in pairs]

    def write(self, chunk: int, weights: Leaves) -> None:
        for ref, leaf in zip(self._refs[chunk], weights, strict=True):
            if ref is not None:
                ref[...] = tiled(leaf)


class WindowTotal(Total):
    """Totals of a chunk's gradients: whole in a window, and this device's part for the step.

    A pullback adds whole gradients to `refs`, the window. A reduce job sums the gradients over data
    shards, and adds this device's part to `results`, the totals of the step. A gradient that D
    shards cannot share has one whole total, which is both window and result.

    Args:
      axes: the mesh axes over which values vary.
      spreads: the sharding of each gradient.
      windows: for each gradient that data shards share its ref in the window; None for other
        gradients.
    """

    def __init__(
        self,
        like: Leaves,
        axes: tuple[str, ...],
        spreads: Sequence[Spread],
        windows: Leaves,
    ) -> None:
        self._spreads = spreads
        # A trace finds the types of the parts.
        parts = jax.eval_shape(lambda: scatter([vary(x, axes) for x in like], spreads, lead=1))
        super().__init__(parts, axes)
        self._results = self.refs
        pairs = zip(self.refs, windows, strict=True)
        self.refs = [result if window is None else window for result, window in pairs]

    @property
    def results(self) -> Leaves:
        return self._results

    def shared_out(self, is_there: Any = True) -> Leaves:
        """Sum the gradients in windows over data shards; return this device's part.

        Args:
          is_there: whether the windows hold this chunk's gradients, perhaps traced; if not, this
            rank adds zeros.
        """
        parts = []
        for result, ref, spread in zip(self._results, self.refs, self._spreads, strict=True):
            if ref is not result:
                value = tiled(ref[...])
                if is_there is not True:
                    value = jnp.where(is_there, value, jnp.zeros_like(value))
                parts += scatter([value], [spread], lead=1)
        return parts

    def add_parts(self, parts: Leaves) -> None:
        """Add the parts that `shared_out` returned to `results`."""
        for (result, _), part in zip(self._in_windows, parts, strict=True):
            # The barrier prevents this: XLA for TPUs moves a reduction out of a loop if its result
            # is added to a carry, and the loop then carries the whole sum (jaxlib 0.10.2).
            result[...] += barrier(part)[0]

    def reduced(
        self,
        spreads: Sequence[Spread],
        axes: tuple[str, ...],
        *,
        lead: int = 0,  # noqa: ARG002
    ) -> Leaves:
        """Sum the totals over the axes over which `shared_out` has not summed."""
        return reduce_parts(self.all(), spreads, axes)

    def clear(self) -> None:
        """Clear the windows before this rank adds gradients of the next chunk."""
        for _, ref in self._in_windows:
            ref[...] = tiled(jnp.zeros_like(ref[...]))

    @property
    def _in_windows(self) -> list[tuple[Any, Any]]:
        """Pairs of refs, part and window, for the gradients that shards share."""
        pairs = zip(self._results, self.refs, strict=True)
        return [(result, ref) for result, ref in pairs if ref is not result]


def chunk_totals(
    chunks: Sequence[Leaves],
    axes: tuple[str, ...],
    windows: Windows | None,
    spreads: Sequence[Sequence[Spread]],
) -> list[Total]:
    """Make [V] totals of the gradients of each chunk.

    Args:
      chunks: [V] an example gradient for each trained weight.
      windows: the program's windows, if it has any. Chunks of one window have separate refs if
        their gradients differ in type.
    """
    if windows is None:
        return [Total(like, axes) for like in chunks]

    def cleared(chunk: int) -> Leaves:
        return [vary_like(vary(jnp.zeros_like(x), axes), x) for x in chunks[chunk]]

    shared = [list(map(shares_gradient, of)) for of in spreads]
    refs = refs_in_windows(windows.gradients, chunks, shared, cleared)
    triples = zip(chunks, spreads, refs, strict=True)
    return [WindowTotal(like, axes, of, ref) for like, of, ref in triples]


def refs_in_windows(
    places: Sequence[int],
    types: Sequence[Leaves],
    shared: Sequence[Sequence[bool]],
    make: Callable[[int], Leaves],
) -> list[Leaves]:
    """Make [V] refs for the leaves of each chunk that data shards share; None for other leaves.

    Args:
      places: [V] the window of each chunk.
      types: [V] the types of each chunk's leaves. Chunks of one window with equal types share refs.
      shared: [V] masks of the leaves that data shards share.
      make: a function from the first chunk of a window to the initial values of the refs.
    """
    refs_of: dict[Any, Leaves] = {}
    refs = []
    for chunk, (place, of, mask) in enumerate(zip(places, types, shared, strict=True)):
        # A ref has one type, so chunks share refs only if all their leaves have equal types.
        key = place, tuple((t.shape, t.dtype, varying_in(t)) for t in of), tuple(mask)
        if key not in refs_of:
            leaves = make(chunk)
            with jax.named_scope("windows"):
                pairs = zip(leaves, mask, strict=True)
                refs_of[key] = [jax.new_ref(x) if is_shared else None for x, is_shared in pairs]
        refs.append(refs_of[key])
    return refs


def start_job(job: Job, weights: Any, totals: Sequence[Any], microbatch: Any) -> Callable[[], None]:
    """Start a job before an action; return a function that ends the job, to call after it."""
    # The collective starts here, and `end` is the first use of its result, so the compiler may
    # overlap it with the action. All data shards of a rank take this branch and run the collective,
    # because tables differ only between ranks of `stage`.
    if job.name == "gather":
        whole = weights.gathered(job.chunk, microbatch)
        return lambda: weights.windows.write(job.chunk, whole)
    total = totals[job.chunk]
    parts = total.shared_out()

    def end() -> None:
        total.add_parts(parts)
        total.clear()

    return end
