"""Sums of a step: scalars and gradients, to which a rank's actions add in place.

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
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.overlay import Part, Spot
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import reduce_gradients


class Total:
    """Refs in which scalars or gradients are summed.

    Args:
      like: an example value for each sum.
      axes: the mesh axes over which values vary.
      added: refs of the total of added losses, if the pullback that returns these gradients also
        returns the sum of its added losses; else empty.
    """

    def __init__(self, like: Leaves, axes: tuple[str, ...], added: Sequence[Any] = ()) -> None:
        self._added = list(added)
        with jax.named_scope("totals"):
            # Each rank has its own sums; they are reduced over ranks once, after the last tick.
            self.refs = [jax.new_ref(vary_like(vary(jnp.zeros_like(x), axes), x)) for x in like]

    @property
    def targets(self) -> Leaves:
        """The refs to which a pullback adds."""
        return [*self.refs, *self._added]

    @property
    def results(self) -> Leaves:
        """The refs that hold the totals after the last action."""
        return self.refs

    @property
    def of_chunk(self) -> Total:
        """The total of the whole chunk: this total (a `TotalView` has only a part of it)."""
        return self

    def add(self, values: Leaves) -> None:
        for ref, value in zip(self.targets, values, strict=True):
            ref[...] += value.astype(ref.dtype)

    def beside(self, added: Leaves) -> Total:
        """Copy the totals, with the same refs but other refs for added losses."""
        totals = copy.copy(self)
        totals._added = added  # noqa: SLF001  an attribute of this class
        return totals

    def all(self) -> Leaves:
        return [ref[...] for ref in self.results]

    def reduced(self, spreads: Sequence[Spread], axes: tuple[str, ...], *, lead: int = 0) -> Leaves:
        """Sum the totals over mesh axes; `reduce_gradients` explains the arguments."""
        return reduce_gradients(self.all(), spreads, axes, lead=lead)


class TotalView:
    """Totals of one stage's gradients, in refs that stages of several groups share.

    A gradient that fills a ref is added in place. A gradient that is a part of a ref is first
    summed in a ref of its own, from `begin` to `end`. `Total` explains ``added``.
    """

    def __init__(self, total: Total, spots: tuple[Spot, ...], added: Leaves) -> None:
        self._added, self.of_chunk = added, total
        # A pullback adds to refs (`with_refs`), and a `Part` of a ref is no ref.
        self._parts = [Part(total.refs[spot.cell], spot) for spot in spots]
        self._is_whole = [spot.part is None for spot in spots]
        self._refs = [total.refs[spot.cell] for spot in spots]
        self.refs: Leaves = []

    def begin(self) -> None:
        """Make the `refs` for the gradients of one action."""
        self.refs = [
            ref if whole else jax.new_ref(vary(jnp.zeros(part.shape, ref.dtype), varying_in(ref)))
            for ref, part, whole in zip(self._refs, self._parts, self._is_whole, strict=True)
        ]

    def end(self, *, changed: bool) -> None:
        """Add the action's sums to the shared refs, if the action has ``changed`` any."""
        for ref, part, whole in zip(self.refs, self._parts, self._is_whole, strict=True):
            if changed and not whole:
                part[...] += ref[...]
        self.refs = []

    @property
    def targets(self) -> Leaves:
        """The refs to which a pullback adds."""
        return [*self.refs, *self._added]


@dataclass(frozen=True, eq=False)
class StepSums:
    """The sums of a step, and the values that actions keep for its results.

    Attributes:
      keep: the method `Forward.keep` of the stages that the actions run.
      scalars: by name, totals of the sums of outcomes: the loss, its weight, the sums for metrics,
        and the sums of stages.
      added: the total of losses that stages and ends add; empty if there are none.
      chunk_grads: [V] the totals of each chunk's gradients.
      ends_grads: the totals of the gradients of embed and head.
      input_grads: [M, b, ...] gradients for the inputs' float leaves; [M N, ...] with slices.
      results: [M, b, ...] outputs of an inference; [M N, ...] with slices.
    """

    keep: Callable[..., None]
    scalars: dict[str, Total]
    added: Total
    chunk_grads: list[Any]
    ends_grads: Any
    input_grads: Any
    results: Any = None

    @property
    def refs(self) -> dict[str, Leaves]:
        """All refs, by the kind of their sums."""
        chunks = {f"chunk{v}": total.refs for v, total in enumerate(self.chunk_grads)}
        scalars = {name: total.refs for name, total in self.scalars.items()}
        kept = {"inputs": self.input_grads.refs, "results": self.results.refs}
        ends = {f"ends{n}": [ref] for n, ref in enumerate(self.ends_grads.refs)}
        return chunks | scalars | kept | ends | {"added": self.added.refs}

    def take(self, outcome: Outcome, microbatch: Any, chunk: int | None = None) -> None:
        """Add the sums of an outcome, and keep its state; ``chunk`` is the chunk of a stage."""
        if outcome.added:
            self.added.add(outcome.added)
        for name, values in outcome.sums.items():
            self.scalars[name].add(values)
        self.keep(outcome.state, chunk, microbatch)
