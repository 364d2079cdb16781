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
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.run.places import StepPlaces, StepRequest, make_sums
from pipeline.core.step.stores.slices import WholeSequences
from pipeline.core.step.stores.store import Stores


class Straight(Actions):
    """A step of such a rank (`is_accumulation` of `schedules.families.accumulation`).

    It needs no memory but the totals: a microbatch is done before the next one starts.

    Args:
      local: the rank's part of the model, whose stages are alike.
      num_microbatches: M.
      step: what is wanted of the step.
    """

    def __init__(self, local: LocalModel, num_microbatches: int, step: StepRequest) -> None:
        places = StepPlaces(make_sums(local, step, num_microbatches), Stores({}, {}))
        super().__init__(local, step, places, WholeSequences())
        self._num_microbatches = num_microbatches

    def run(self) -> None:
        """Run all microbatches."""

        def body(carry: None, microbatch: jax.Array) -> tuple[None, None]:
            self._microbatch(vary(microbatch, self.local.axes))
            return carry, None

        # A scan, so that a microbatch is compiled once; all results go to refs, which it closes
        # over.
        jax.lax.scan(body, None, jnp.arange(self._num_microbatches))

    def _microbatch(self, microbatch: jax.Array) -> None:
        local, embed = self.local, None
        if self.wants_upstream:
            outcome, embed = local.embed_pullback(microbatch)
        else:
            outcome = self.embed(microbatch)
        self.sums.take(outcome, microbatch)
        # Forward through all chunks. Gradients of weights are added late: with all in one piece of
        # code, XLA's CPU backend otherwise makes them before the input's gradient, for which the
        # next pullback waits.
        pullbacks = []
        for chunk in range(local.num_chunks):
            x = outcome.value
            outcome, pullback = local.stage_pullback(chunk, microbatch, x, late=True)
            self.sums.take(outcome, microbatch, chunk)
            pullbacks.append(pullback)
        # Back through all chunks, and then through embed if it or the inputs have gradients.
        dx = self._loss_gradient(outcome.value, microbatch)
        for chunk, pullback in reversed(list(enumerate(pullbacks))) if self.goes_on else ():
            want_x = local.need.x and (chunk > 0 or self.wants_upstream)
            dx = pullback(dx, self.sums.chunk_grads[chunk].targets, want_x=want_x)
        if embed is not None:
            refs = self.sums.ends_grads.targets
            gradients = embed(dx, refs, want_x=self.step.want_inputs)
            if self.step.want_inputs:
                self.sums.input_grads[microbatch] = gradients
