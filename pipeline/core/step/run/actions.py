"""The actions of a timetable on one rank: each action reads values, writes values and adds to sums.

Letters: V chunks, M microbatches, b rows of a microbatch on one data shard. A *row* holds a rank's
entries of the program's tables for one slot. An action returns its message; the tick sends it.

F, B, I and W have one body each. A body names the kinds of values that it reads and writes, and the
stores know their places (`pipeline.core.step.stores.store`). `pipeline.core.step.run.saved` manages
the values from F to its backward, `pipeline.core.step.stores.slices` the values between slices. In
a split backward, I computes everything but the gradients of the stage's weights, and W reads only
the values that its I wrote. Embed, head and loss are always differentiated within B or I, without a
stash.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.autodiff.residuals import Residuals
from pipeline.core.model.loss import logprobs_of
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Facts, StepRequest
from pipeline.core.step.run.saved import Saved
from pipeline.core.step.stores.device import unwritten
from pipeline.core.step.stores.slices import Carries
from pipeline.core.step.stores.store import Row, Stores
from pipeline.core.step.stores.totals import StepSums
from pipeline.core.step.stores.windows import start_job
from schedules.core.costs import is_last_forward_free
from schedules.lowering.program import Op, Slot


class Actions:
    """The actions of a rank's stages of one kind during a step.

    Args:
      sums: the sums to which actions add, and values kept for the results of the step.
      slices: the carries between slices of sequences.
      residuals: a stage's pullback, split into forward and backward, if forwards stash residuals.
      halves: a stage's backward in two halves, if the program has I and W.
    """

    def __init__(
        self,
        kind: StageKind,
        request: StepRequest,
        *,
        sums: StepSums,
        stores: Stores,
        slices: Carries = Carries(),  # noqa: B008  frozen
        residuals: Residuals | None = None,
        halves: Any = None,
    ) -> None:
        self.kind, self.rank, self.request, self.slices = kind, kind.rank, request, slices
        self.sums, self.stores, self.halves = sums, stores, halves
        self.saved = Saved(kind, residuals, stores, slices, self.operand)

    @property
    def wants_upstream(self) -> bool:
        """True if the gradient for stage 0's input is needed."""
        return self.request.want_inputs or self.rank.model.trained.embed

    def run_slot(self, slot: Slot, row: Row, message: Tree) -> Tree:
        """Run the slot's action, if this rank has one; return its message, or else ``message``."""
        # Each op is a loop of at most one trip, not a branch of one switch: XLA copies buffers that
        # a conditional writes in place. All data shards of a rank have one row, so they take the
        # same branch, and an op may hold collectives over their axes.
        for branch, op in enumerate(slot.ops, start=1):
            # No branch for the W of a frozen stage, or for a backward with no trained parameter in
            # its stage or an earlier one: they compute nothing.
            if not (self.does_anything(op) or op.jobs):
                continue
            action = functools.partial(self.run_op, op, row)
            with jax.named_scope(op.label):
                message = self.stores.at_most_once(op, row["op"] == branch, action, message)
        return message

    def run_op(self, op: Op, row: Row) -> Tree:
        """Run an action and its jobs; return the action's message."""
        if op.kind == "F":
            return self._with_jobs(op, row)
        # I adds only those gradients of weights that could not be split off for W.
        changed = op.kind != "I" or bool(self.halves.whole)
        with self.sums.chunk_grads[op.chunk].of_action(changed=changed):
            return self._with_jobs(op, row)

    def _with_jobs(self, op: Op, row: Row) -> Tree:
        # Jobs serve other actions: they gather weights or reduce gradients of another chunk. They
        # start before this action and end after it. Job and action read no result of each other, so
        # the compiler may overlap them.
        chunks, totals = self.rank.chunks, self.sums.chunk_grads
        ends_of_jobs = [start_job(job, chunks, totals, row["microbatch"]) for job in op.jobs]
        message = self._act(op, row) if self.does_anything(op) else self.no_message()
        for end in ends_of_jobs:
            end()
        return message

    def _act(self, op: Op, row: Row) -> Tree:
        return {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_half,
            "W": self._weight_half,
        }[op.kind](op, row)

    def no_message(self) -> Tree:
        """Make a placeholder for ranks or actions that send no message; receivers discard it."""
        return unwritten(self.kind.wire, self.rank.axes)

    # --- the four bodies ---

    def _forward(self, op: Op, row: Row) -> Tree:
        # This comes first, even if this F computes nothing: with `offload` the input's place is
        # free after F, and the backward reads the copy.
        self.saved.begin(op, row)
        # The last stage's F in a step that recomputes: its B, the next action, runs the stage
        # again. But embed must write its state here, because only an F writes state.
        if self.leaves_nothing(op):
            if self.writes_in_embed(op):
                self.operand(op, row, now=True)
            return self.no_message()
        # A call returns more than its value: sums, declared state, and the carry that later slices
        # read.
        x = self.slices.input(row, self.operand(op, row, now=True))
        outcome = self.saved.forward(op, row, x)
        self.take(outcome, row["microbatch"], op.chunk)
        self.slices.keep(row, outcome.carry)
        # In a training step the backward computes the loss, since it needs the pullback of head and
        # loss too.
        if op.last and not self.request.training:
            self._finish(outcome.value, row["microbatch"])
        # The model's last output may fit no message; then it is not sent.
        return self.kind.y_view.fill(self.no_message, outcome.value)

    def _backward(self, op: Op, row: Row) -> Tree:
        # The pullback is rebuilt from residuals, or by a second forward. It is applied to the
        # gradient of the output, and adds the gradients of weights to refs in place.
        y, pullback = self.saved.pullback(op, row)
        dy = self._output_gradient(op, row, y)
        # No part before the head is trained, but the last stage's backward computes the loss.
        if not self.goes_on:
            return self.no_message()
        dx = pullback(dy, self._gradients(op), want_x=self._wants_given(op))
        return self._upstream(op, row, self.slices.back(row, dx))

    def _input_half(self, op: Op, row: Row) -> Tree:
        arguments = self.kind.arguments(op.chunk, row["microbatch"])
        start = self.saved.start(op, row)
        output = functools.partial(self.saved.output, row, start, arguments)
        if not self.goes_on:  # no part before the head is trained: run only head and loss
            self._loss_gradient(output(), row["microbatch"])
            return self.no_message()
        # The last stage's I computes the loss, and needs the stage's output for it. If I runs the
        # stage again, it computes this output itself, and calls the function of it; that saves a
        # forward. Other stages receive the gradient by message, and do not compute the output.
        dy: Any = functools.partial(self._output_gradient, op, row)
        if not (op.last and self.saved.residuals is None):
            dy = dy(output() if op.last else None)
        dx, crossing = self.halves.input_half(
            *arguments, start, dy, self._gradients(op), want_x=self._wants_given(op)
        )
        self.stores.write("crossing", op, row, crossing)
        return self._upstream(op, row, self.slices.back(row, dx))

    def _weight_half(self, op: Op, row: Row) -> Tree:
        # W reads no operand, no stash and no message: their places are free after I.
        arguments = self.kind.arguments(op.chunk, row["microbatch"])
        crossing = self.stores.read("crossing", op, row)
        self.halves.weight_half(*arguments, crossing, self._gradients(op))
        return self.no_message()

    # --- tests: does an action compute anything? ---

    @property
    def goes_on(self) -> bool:
        """True if the gradient for a stage's output is needed."""
        return self.kind.goes_back

    def does_anything(self, op: Op) -> bool:
        """Tell whether an action computes anything; the last stage's backward computes the loss."""
        if op.kind == "W":
            return self.kind.sums_weights
        return op.kind == "F" or op.last or self._wants_x(op) or self.kind.sums_weights

    def writes_in_embed(self, op: Op) -> bool:
        return op.first and self.rank.declared is not None

    def leaves_nothing(self, op: Op) -> bool:
        """Tell whether the next action is this forward's backward, which repeats the forward."""
        # The repetition in the backward keeps only the value of a call. State, sums and carries
        # come from F, so a stage with any of them must run its F.
        leaves = self.kind.writes or bool(self.rank.facts.stage_sums)
        leaves = leaves or self.slices.has_carries
        # If all ranks share the head, no op is last: the head's input is a message.
        recomputes = self.saved.residuals is None
        return self.request.training and is_last_forward_free(
            recomputes=recomputes, shares_head=not op.last, writes=leaves
        )

    def _wants_x(self, op: Op) -> bool:
        return self.kind.need.x and (not op.first or self.wants_upstream)

    def _wants_given(self, op: Op) -> bool:
        """Tell whether a pullback returns gradients for the stage's input and earlier carries."""
        return self.slices.has_carries or self._wants_x(op)

    # --- before the first stage, and after the last ---

    def operand(self, op: Op, row: Row, *, now: bool = False) -> Tree:
        """Return a stage's input: its message, or for stage 0 the value of embed.

        Args:
          now: whether the action is a forward; then embed's sums and state are kept too.
        """
        if not op.first:
            return self.stores.read("operand", op, row)
        outcome = self.embed(row["microbatch"], now=now)
        # A backward that runs embed again must neither add its sums nor write its state a second
        # time.
        if now:
            self.take(outcome, row["microbatch"])
        return outcome.value

    def embed(self, microbatch: Any, *, now: bool = False) -> Outcome:
        """Return the outcome of embed; ``now`` is True in a forward, which may write state."""
        rank = self.rank
        return ends.embed(rank, rank.ends, at(rank.batch.inputs, microbatch), microbatch, now=now)

    def _finish(self, y: Tree, microbatch: Any) -> None:
        """Run head and loss after the last forward; without a loss, keep the user's outputs."""
        rank, take_loss = self.rank, self.request.take_loss
        outcome = ends.finish(rank, rank.ends, y, microbatch, take_loss=take_loss)
        value = outcome.value
        if self.request.logprobs:
            value = logprobs_of(value, at(rank.batch.targets, microbatch))
        self.take(outcome, microbatch)
        if not take_loss:
            self.sums.results[microbatch] = value

    def _upstream(self, op: Op, row: Row, dx: Leaves) -> Tree:
        """Make the gradient of a stage's input a message; for stage 0, apply embed's pullback."""
        if not op.first:
            # If no earlier part is trained, the gradient is not read:
            # `schedules.lowering.needs.without` has dropped its exchange from the program.
            return self.as_message(dx) if self.kind.need.x else self.no_message()
        # Stage 0's input came from embed on this rank. Embed stashes nothing: its pullback is made
        # again and applied here, and no message is sent.
        if self.wants_upstream:
            _, embed = ends.embed_pullback(self.rank, row["microbatch"])
            of_inputs = embed(dx, self.sums.ends_grads.targets, want_x=self.request.want_inputs)
            if self.request.want_inputs:
                self.sums.input_grads[row["microbatch"]] = of_inputs
        return self.no_message()

    def _output_gradient(self, op: Op, row: Row, y: Tree) -> Leaves:
        """Return the gradients for output and carry, from the loss or the next stage's message.

        ``y`` is the stage's output; only the last stage reads it.
        """
        if op.last:
            dy = self._loss_gradient(y, row["microbatch"])
        else:
            dy, _ = partition(self.stores.read("gradient", op, row))
        return self.slices.cotangent(row, dy)

    def _gradients(self, op: Op) -> Leaves:
        refs: Leaves = self.sums.chunk_grads[op.chunk].targets
        return refs

    def _loss_gradient(self, y: Tree, microbatch: Any) -> Leaves:
        """Compute the gradient for the last stage's output; add the loss to the step's sums."""
        outcome, pullback = ends.loss_pullback(self.rank, y, microbatch)
        self.take(outcome, microbatch)
        # A cotangent has the type of its value, and the loss varies over all axes of the rank.
        cotangent = vary(jnp.full((), self.rank.loss.of_loss), self.rank.axes)
        return pullback([cotangent], self.sums.ends_grads.targets, want_x=self.goes_on)

    def as_message(self, floats: Leaves) -> Tree:
        """Make the gradient of a stage's input a message; leaves without a gradient are zeros."""
        _, others = partition(self.kind.x)
        gradient = combine(self.kind.x, floats, blank(others, self.rank.axes))
        return self.kind.x_view.fill(self.no_message, gradient)

    def take(self, outcome: Outcome, microbatch: Any, chunk: int | None = None) -> None:
        """Add the sums of an outcome, and keep its state; ``chunk`` is the chunk of a stage."""
        self.sums.take(outcome)
        if self.rank.declared is not None:
            self.rank.declared.keep(outcome.state, self.kind.position, chunk, microbatch)


def sums_of_action(
    op: Op, names: Iterable[str], facts: Facts, *, training: bool
) -> tuple[str, ...]:
    """List the names of the sums and of declared state that an action may change.

    Args:
      names: the names in `StepSums.refs`, and "state" with a number.
    """
    parts: tuple[str, ...] = ("state",)
    own = set(facts.stage_sums) if op.kind == "F" else {f"chunk{op.chunk}"}
    if facts.adds and (op.kind != "F" or not training):
        own.add("added")
    # Head and loss run in the last stage's backward, or in its F if there is none; embed is
    # differentiated in the first stage's backward.
    if op.kind in ("B", "I") if training else op.kind == "F":
        own |= {"loss", "weight", "metrics", "results"} if op.last else set()
        own |= {"inputs"} if op.first else set()
        parts += ("ends",) if op.first or op.last else ()
    return tuple(name for name in names if name in own or name.startswith(parts))
