"""Sums of a step: scalars and gradients, to which a rank's actions add in place.

Letters: V chunks, D data shards, M microbatches, b rows of a microbatch on one data shard.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from collectives.compat import varying_in
from pipeline.base.tree import Leaves, vary_like
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.overlay import Part, View
from pipeline.core.placement.placement import Spread
from pipeline.core.placement.zero import reduce_gradients


class Total:
    """Refs in which scalars or gradients are summed.

    Args:
      axes: the mesh axes over which values vary.
    """

    def __init__(self, like: Leaves, axes: tuple[str, ...]) -> None:
        with jax.named_scope("totals"):
            # Each rank has its own sums; they are reduced over ranks once, after the last tick.
            self.refs = [jax.new_ref(vary_like(vary(jnp.zeros_like(x), axes), x)) for x in like]
        self._view, self._added, self._own = View(), list[Any](), dict[int, Any]()

    def viewed(self, view: View, added: Sequence[Any]) -> Total:
        """Copy the totals, with the same refs, for the gradients of one kind of stage.

        Args:
          added: refs of the total of added losses, if the pullback that returns these gradients
            also returns the sum of its added losses; else empty.
        """
        totals = copy.copy(self)
        totals._view, totals._added, totals._own = view, list(added), {}  # noqa: SLF001
        return totals

    @property
    def targets(self) -> Leaves:
        """The refs to which a pullback adds."""
        refs = [self._own.get(n, self.refs[cell]) for n, cell in enumerate(self._cells)]
        return [*refs, *self._added]

    @property
    def _cells(self) -> Sequence[int]:
        return self._view.cells(len(self.refs))

    @contextlib.contextmanager
    def of_action(self, *, changed: bool) -> Iterator[None]:
        """Make the targets of one action; ``changed`` tells whether the action adds to any."""
        # A gradient that fills a ref is added in place. A gradient that is a part of a ref is first
        # summed in a ref of its own: a pullback adds to refs, and a `Part` of a ref is no ref.
        spots = enumerate(self._view.spots or ())
        parts = {n: Part(self.refs[s.cell], s) for n, s in spots if s.part is not None}
        for n, part in parts.items():
            ref = self.refs[self._cells[n]]
            self._own[n] = jax.new_ref(vary(jnp.zeros(part.shape, ref.dtype), varying_in(ref)))
        yield
        for n, part in parts.items():
            if changed:
                part[...] += self._own[n][...]
        self._own.clear()

    @property
    def results(self) -> Leaves:
        """The refs that hold the totals after the last action."""
        return self.refs

    def add(self, values: Leaves) -> None:
        for ref, value in zip(self.refs, values, strict=True):
            ref[...] += value.astype(ref.dtype)

    def all(self) -> Leaves:
        return [ref[...] for ref in self.results]

    def reduced(self, spreads: Sequence[Spread], axes: tuple[str, ...], *, lead: int = 0) -> Leaves:
        """Sum the totals over mesh axes; `reduce_gradients` explains the arguments."""
        return reduce_gradients(self.all(), spreads, axes, lead=lead)


@dataclass(frozen=True, eq=False)
class StepSums:
    """The sums of a step, and the values that actions keep for its results.

    Attributes:
      scalars: by name, totals of the sums of outcomes: the loss, its weight, the sums for metrics,
        and the sums of stages.
      added: the total of losses that stages and ends add; empty if there are none.
      chunk_grads: [V] the totals of each chunk's gradients.
      ends_grads: the totals of the gradients of embed and head.
      input_grads: [M, b, ...] gradients for the inputs' float leaves; [M N, ...] with slices.
      results: [M, b, ...] outputs of an inference; [M N, ...] with slices.
    """

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

    def take(self, outcome: Outcome) -> None:
        if outcome.added:
            self.added.add(outcome.added)
        for name, values in outcome.sums.items():
            self.scalars[name].add(values)
