"""One rank that takes each microbatch straight through all stages and back: accumulation.

Letters: K stages, all on the rank; M microbatches. Nothing is sent, and no microbatch begins before
the one before it is done. So a microbatch is one piece of code, what its forward passes leave is
the compiler's to keep, and there are no branches, tables, stashes or messages: a loop that adds up
what `jax.vjp` returns, as one would write it by hand.

Not for ``remat="stage"``: XLA's CPU backend drops the barriers that keep a forward apart from its
repetition and makes one of the two, so nothing is saved; as actions of a timetable they stay two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.tree import at
from pipeline.kernel.actions import Actions
from pipeline.rank.cell import Cell


class Straight(Actions):
    """A step of such a rank (`is_straight` of `pipeline.plan.choose`).

    Totals are those of `Actions`; it needs no other memory.

    Args:
      cell: the rank's part of the model, whose stages are alike.
      num_microbatches: M.
      want_inputs: whether gradients for the inputs' float leaves are kept.
    """

    def __init__(self, cell: Cell, num_microbatches: int, *, want_inputs: bool) -> None:
        self.training, self._num_microbatches = True, num_microbatches
        self._make_totals(cell, num_microbatches, take_loss=True, want_inputs=want_inputs)

    def run(self) -> None:
        """All microbatches."""

        def body(carry: None, microbatch: jax.Array) -> tuple[None, None]:
            self._microbatch(vary(microbatch, self.cell.axes))
            return carry, None

        jax.lax.scan(body, None, jnp.arange(self._num_microbatches))

    def _microbatch(self, microbatch: jax.Array) -> None:
        cell, embed = self.cell, None
        if self.wants_upstream:
            x, embed = cell.embed_pullback(microbatch)
        else:
            x = cell.embed(cell.ends_weights, at(cell.batch.inputs, microbatch), microbatch)
        pullbacks = []
        for chunk in range(cell.num_chunks):
            x, pullback = cell.stage_pullback(chunk, microbatch, x)
            pullbacks.append(pullback)
        dx = self._loss_gradient(x, microbatch)
        for chunk, pullback in reversed(list(enumerate(pullbacks))) if self.goes_on else ():
            want_x = cell.way.x and (chunk > 0 or self.wants_upstream)
            dx = pullback(dx, self.chunk_grads[chunk].refs, want_x=want_x)
        if embed is not None:
            found = embed(dx, self.ends_grads.refs, want_x=self.want_inputs)
            if self.want_inputs:
                self.input_grads[microbatch] = found
