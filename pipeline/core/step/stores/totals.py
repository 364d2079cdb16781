"""Sums of a step: scalars, and gradients, which a rank's actions add to in place.

Letters: V chunks, D data shards, M microbatches, b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, vary_like
from pipeline.core.autodiff.jaxpr.primitives import barrier
from pipeline.core.autodiff.jaxpr.refs import tiled
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.overlay import Part, Spot
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import scatter, shares_gradient


class Total:
    """Scalars or gradients that are added up, in the order they come.

    Args:
      like: a value for each.
      axes: the mesh axes over which values vary.
      added: refs of the total of added losses, if a pullback that gives these gradients sums up
        such losses too.
    """

    def __init__(self, like: Leaves, axes: tuple[str, ...], added: Sequence[Any] = ()) -> None:
        self._added = list(added)
        with jax.named_scope("totals"):
            self.refs = [jax.new_ref(vary_like(vary(jnp.zeros_like(x), axes), x)) for x in like]

    @property
    def targets(self) -> Leaves:
        """The refs that a pullback adds to."""
        return [*self.refs, *self._added]

    @property
    def results(self) -> Leaves:
        """The refs that hold the totals once all is added."""
        return self.refs

    @property
    def whole(self) -> Total:
        """The totals of which these are a part: these."""
        return self

    def add(self, values: Leaves, real: Any = True) -> None:
        """Add one value to each of `targets`, if it is ``real``, which may be traced."""
        if real is False:
            return
        for ref, value in zip(self.targets, values, strict=True):
            ref[...] += _if(real, value).astype(ref.dtype)

    def beside(self, added: Leaves) -> Total:
        """These totals, for pullbacks that sum up added losses as said."""
        found = copy.copy(self)
        found._added = added  # noqa: SLF001  its own
        return found

    def all(self) -> Leaves:
        """The totals."""
        return [ref[...] for ref in self.results]


class WindowTotal(Total):
    """Total of gradients of which a device keeps its part, and a window has a run's whole.

    What D shards cannot share has a whole total of its own.

    Args:
      like: a gradient for each.
      axes: the mesh axes over which values vary.
      spreads: where each lies.
      windows: of gradients that shards share, the refs that they are added up in; None for others.
      added: as of `Total`.
    """

    def __init__(
        self,
        like: Leaves,
        axes: tuple[str, ...],
        spreads: Sequence[Spread],
        windows: Leaves,
        added: Sequence[Any] = (),
    ) -> None:
        self._spreads = spreads
        # Their types alone are looked at.
        parts = jax.eval_shape(lambda: scatter([vary(x, axes) for x in like], spreads, lead=1))
        super().__init__(parts, axes, added)
        self._results = self.refs
        pairs = zip(self.refs, windows, strict=True)
        self.refs = [own if window is None else window for own, window in pairs]

    @property
    def results(self) -> Leaves:
        """The refs of what each device keeps."""
        return self._results

    def shared_out(self, real: Any = True) -> Leaves:
        """This device's part of what is in windows, summed over data shards, if it is ``real``."""
        found = []
        for own, ref, spread in zip(self._results, self.refs, self._spreads, strict=True):
            if ref is not own:
                found += scatter([_if(real, tiled(ref[...]))], [spread], lead=1)
        return found

    def keep(self, parts: Leaves) -> None:
        """Add what was `shared_out` to what this device keeps."""
        for (own, _), part in zip(self._in_windows, parts, strict=True):
            # Behind a barrier: XLA for TPUs takes a reduction whose result is added to what a loop
            # carries out of the loop, and so carries the sum whole (jaxlib 0.10.2).
            own[...] += barrier(part)[0]

    def leave(self) -> None:
        """Clear the windows for other chunks; on every rank, so never while one needs its own."""
        for _, ref in self._in_windows:
            ref[...] = tiled(jnp.zeros_like(ref[...]))

    @property
    def _in_windows(self) -> list[tuple[Any, Any]]:
        """The refs of what this device keeps and of the windows, of gradients that shards share."""
        pairs = zip(self._results, self.refs, strict=True)
        return [(own, ref) for own, ref in pairs if ref is not own]


def window_totals(
    chunks: Sequence[Leaves],
    axes: tuple[str, ...],
    spreads: Sequence[Sequence[Spread]],
    places: Sequence[int],
    added: Sequence[Any],
) -> list[WindowTotal]:
    """[V] totals of the gradients of each chunk.

    Args:
      chunks: [V] a gradient for each weight that is trained.
      axes: the mesh axes over which values vary.
      spreads: [V] where each lies.
      places: [V] the window of each chunk. Chunks of one window whose gradients have other types
        have refs of their own.
      added: as of `Total`.
    """

    def cleared(chunk: int) -> Leaves:
        return [vary_like(vary(jnp.zeros_like(x), axes), x) for x in chunks[chunk]]

    shared = [list(map(shares_gradient, of)) for of in spreads]
    windows = refs_in_windows(places, chunks, shared, cleared)
    triples = zip(chunks, spreads, windows, strict=True)
    return [WindowTotal(like, axes, of, refs, added) for like, of, refs in triples]


def refs_in_windows(
    places: Sequence[int],
    types: Sequence[Leaves],
    shared: Sequence[Sequence[bool]],
    make: Callable[[int], Leaves],
) -> list[Leaves]:
    """[V] refs of the leaves of each chunk that data shards share, None for others.

    Args:
      places: [V] the window of each chunk.
      types: [V] of its leaves. Chunks of one window share their refs if these are equal.
      shared: [V] which of the leaves data shards share.
      make: from the first chunk that needs them to what refs hold at first.
    """
    made: dict[Any, Leaves] = {}
    found = []
    for chunk, (place, of, mask) in enumerate(zip(places, types, shared, strict=True)):
        key = place, tuple((t.shape, t.dtype, varying_in(t)) for t in of), tuple(mask)
        if key not in made:
            leaves = make(chunk)
            with jax.named_scope("windows"):
                pairs = zip(leaves, mask, strict=True)
                made[key] = [jax.new_ref(x) if is_shared else None for x, is_shared in pairs]
        found.append(made[key])
    return found


class TotalView:
    """Totals of one stage's gradients, within those that several share.

    Gradients are added in place where they have a ref of their own. Those that are a part of one
    are summed beside it first, from `begin` to `end`. ``added`` as of `Total`.
    """

    def __init__(self, total: Total, spots: tuple[Spot, ...], added: Leaves) -> None:
        self._added, self.whole = added, total
        self._parts = [Part(total.refs[spot.cell], spot) for spot in spots]
        self._own = [spot.part is None for spot in spots]
        self._refs = [total.refs[spot.cell] for spot in spots]
        self.refs: Leaves = []

    def begin(self) -> None:
        """Make `refs` for the gradients of one action."""
        self.refs = [
            ref if own else jax.new_ref(vary(jnp.zeros(part.shape, ref.dtype), varying_in(ref)))
            for ref, part, own in zip(self._refs, self._parts, self._own, strict=True)
        ]

    def end(self, *, changed: bool) -> None:
        """Add what was summed, if anything."""
        for ref, part, own in zip(self.refs, self._parts, self._own, strict=True):
            if changed and not own:
                part[...] += ref[...]
        self.refs = []

    @property
    def targets(self) -> Leaves:
        """The refs that a pullback adds to."""
        return [*self.refs, *self._added]

    def add(self, values: Leaves, real: Any = True) -> None:
        """Add one value to each, if it is ``real``, which may be traced."""
        if real is False:
            return
        for place, value in zip([*self._parts, *self._added], values, strict=True):
            place[...] += _if(real, value)


def _if(real: Any, value: jax.Array) -> jax.Array:
    """The value if it is real, else zeros; no select where that is known."""
    return value if real is True else jnp.where(real, value, jnp.zeros_like(value))


@dataclass(frozen=True, eq=False)
class Sums:
    """All that the actions of a step add up, and what they keep for its results.

    Attributes:
      keep: `Forward.keep` of the stages whose actions these are.
      scalars: by name, totals of the sums of outcomes: the loss, its weight, the sums that metrics
        are made of, and those of stages.
      added: the total of losses that stages and ends add, if any does.
      chunk_grads: [V] totals, and ends_grads, totals for embed and head.
      input_grads: [M, b, ...] gradients for the inputs' float leaves; with slices, here and below,
        [M N, ...] of units.
      results: [M, b, ...] outputs of an inference.
    """

    keep: Callable[..., None]
    scalars: dict[str, Total]
    added: Total
    chunk_grads: list[Any]
    ends_grads: Any
    input_grads: Any
    results: Any = None

    def take(
        self, outcome: Outcome, microbatch: Any, chunk: Any = None, *, real: Any = True
    ) -> None:
        """Add up and keep all that a forward call leaves beside its value.

        Args:
          outcome: of embed, of a stage, or of head and loss.
          microbatch: its index.
          chunk: the stage's, perhaps traced.
          real: whether it is to be taken, perhaps traced.
        """
        if outcome.added:
            self.added.add(outcome.added, real)
        for name, values in outcome.sums.items():
            self.scalars[name].add(values, real)
        self.keep(outcome.state, chunk, microbatch, real)
