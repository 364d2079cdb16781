"""Gradient accumulation on one rank: each microbatch runs through all stages and back.

Letters: K stages, all on the rank; M microbatches. No message is sent, and a microbatch starts only
after the previous one has ended. So the code for a microbatch has no branches, tables, stashes or
messages, and the compiler keeps the residuals. The step is a loop that sums the results of
`jax.vjp`, like a loop written by hand.

This is not used with ``remat="stage"``: XLA's CPU backend drops the barriers between a forward and
its repetition and merges the two, so no memory is saved. Actions of a timetable stay separate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.run.places import make_sums, sums_of_kind
from pipeline.core.step.stores.store import Stores


class Straight(Actions):
    """A step whose schedule is gradient accumulation: one rank, one microbatch after the other.

    All stages have one structure. Between two microbatches only the sums are stored.
    """

    def __init__(self, step: OpenedStep) -> None:
        (kind,) = step.kinds
        sums = sums_of_kind(make_sums(step), kind)
        super().__init__(kind, step.request, sums=sums, stores=Stores({}, {}))
        self._num_microbatches = step.plan.schedule.num_microbatches

    def run(self) -> None:
        def body(carry: None, microbatch: jax.Array) -> tuple[None, None]:
            self._microbatch(vary(microbatch, self.rank.axes))
            return carry, None

        # A scan, so that a microbatch is compiled once. Its body closes over refs, to which all
        # results are written.
        jax.lax.scan(body, None, jnp.arange(self._num_microbatches))

    def _microbatch(self, microbatch: jax.Array) -> None:
        kind, embed = self.kind, None
        if self.wants_upstream:
            outcome, embed = ends.embed_pullback(self.rank, microbatch)
        else:
            outcome = self.embed(microbatch)
        self.take(outcome, microbatch)
        # Forward through all chunks. Gradients of weights are added late (`late`): XLA's CPU
        # backend would otherwise compute them before the input's gradient, which the next pullback
        # needs.
        pullbacks = []
        for chunk in range(self.rank.num_chunks):
            arguments = *kind.arguments(chunk, microbatch), outcome.value
            outcome, pullback = kind.linearize(*arguments, late=True)
            self.take(outcome, microbatch, chunk)
            pullbacks.append(pullback)
        # Back through all chunks, and then through embed if it or the inputs have gradients.
        dx = self._loss_gradient(outcome.value, microbatch)
        for chunk, pullback in reversed(list(enumerate(pullbacks))) if self.goes_on else ():
            want_x = kind.need.x and (chunk > 0 or self.wants_upstream)
            dx = pullback(dx, self.sums.chunk_grads[chunk].targets, want_x=want_x)
        if embed is not None:
            refs = self.sums.ends_grads.targets
            gradients = embed(dx, refs, want_x=self.request.want_inputs)
            if self.request.want_inputs:
                self.sums.input_grads[microbatch] = gradients
