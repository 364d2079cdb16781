"""The actions of a timetable, run by one rank: each reads its operands and leaves its results.

Letters: V chunks, M microbatches, b rows of a microbatch on one data shard. A *row* holds a
rank's entries of the program's tables for one slot. Whoever runs an action gets its message back
and sends it.

With ``keep="input"`` a backward starts from the stage's input and runs its forward again, so the
last stage's forward, whose output only its own backward needs, does nothing. With
``keep="residuals"`` it starts from what the forward stashed. A backward in two halves does all but
the gradients of the stage's weights in I, and W reads only what its I left. Embed, head and loss
are always differentiated within B or I; nothing of theirs is stashed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.loss import logprobs_of
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.device import Memory, StepRequest, at_most_once, unwritten
from schedules.core.costs import is_last_forward_free
from schedules.lowering.program import Op, Slot

Row = Mapping[str, Any]


class Actions:
    """The actions of a rank during a step.

    Args:
      local: the rank's part of the model.
      step: what is wanted of the step.
      memory: what actions read and write.
    """

    def __init__(self, local: LocalModel, step: StepRequest, memory: Memory) -> None:
        self.local, self.step, self.memory = local, step, memory

    @property
    def wants_upstream(self) -> bool:
        """True if the gradient for stage 0's input is needed."""
        return self.step.want_inputs or self.local.model.trained.embed

    def run_slot(self, slot: Slot, row: Row, message: Tree) -> Tree:
        """Do the slot's action, if this rank has one; returns its message, or else ``message``."""
        for branch, op in enumerate(slot.ops, start=1):
            if not (self._does_anything(op) or op.jobs):
                continue
            action = functools.partial(self._run, op, row)
            with jax.named_scope(op.label):
                once = self.memory.hosted.at_most_once if op.host else at_most_once
                message = once(row["op"] == branch, action, message)
        return message

    def _run(self, op: Op, row: Row) -> Tree:
        # What is for other actions starts before this one's products and is awaited behind them.
        chunks = self.local.rank.chunks
        jobs = dict(op.jobs)
        weights = chunks.gathered(jobs["gather"], row["microbatch"]) if "gather" in jobs else None
        total = self.memory.chunk_grads[jobs["reduce"]].whole if "reduce" in jobs else None
        parts = total.shared_out() if total else []
        message = self._act(op, row) if self._does_anything(op) else self.no_message()
        if "gather" in jobs:
            chunks.windows.write(jobs["gather"], weights)
        if total:
            total.keep(parts)
            total.leave()
        return message

    def _act(self, op: Op, row: Row) -> Tree:
        return {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_half,
            "W": self._weight_half,
        }[op.kind](op, row)

    def no_message(self) -> Tree:
        """Make a placeholder message for ranks or actions without one; receivers discard it."""
        return unwritten(self.local.wire, self.local.axes)

    def sent(self, y: Tree) -> Tree:
        """An output in the form of a message."""
        return y

    def _forward(self, op: Op, row: Row) -> Tree:
        local, memory, microbatch = self.local, self.memory, row["microbatch"]
        if "stash" in op.host and memory.residuals is None:
            memory.host_stashes[row["stash"]] = self.operand(op, row)
        if self._leaves_nothing(op):
            if op.first and local.rank.declared is not None:
                self.operand(op, row, now=True)
            return self.no_message()
        x = self.given(row, self.operand(op, row, now=True))
        arguments = *local.stage_arguments(op.chunk, microbatch, now=True), x
        if memory.residuals is None:
            outcome = local.stage(*arguments)
        else:
            outcome, stash = memory.residuals.forward(*arguments)
            self.stashes(op)[row["stash"]] = stash
        memory.take(outcome, microbatch, op.chunk)
        if memory.carries is not None:
            memory.carries.keep(row, outcome.carry)
        if op.last and not self.step.training:
            self._finish(outcome.value, microbatch)
        return self.sent(outcome.value)

    def _leaves_nothing(self, op: Op) -> bool:
        """Tell whether a forward is not needed: its backward, the next action, runs it again."""
        leaves = self.local.writes or bool(self.local.rank.facts.stage_sums)
        leaves = leaves or self.memory.carries is not None
        # Where all ranks share the head, no op is last: its input is a message.
        return self.step.training and is_last_forward_free(
            recomputes=self.memory.residuals is None, shares_head=not op.last, writes=leaves
        )

    def operand(self, op: Op, row: Row, *, now: bool = False) -> Tree:
        """A stage's input: from its message, or made from the user's inputs.

        ``now`` where a forward takes it, and with it all else that embed leaves.
        """
        if "stash" in op.host and op.kind != "F":
            return self.memory.host_stashes[row["stash"]]
        if not op.first:
            return self.memory.buffers[row["operand"]]
        microbatch = row["microbatch"]
        outcome = self.embed(microbatch, now=now)
        if now:
            self.memory.take(outcome, microbatch)
        return outcome.value

    def given(self, row: Row, x: Tree) -> Tree:
        """The input of a stage: the activation; with slices, with the carries of earlier ones."""
        return x if self.memory.carries is None else self.memory.carries.given(row, x)

    def embed(self, microbatch: Any, *, now: bool = False) -> Outcome:
        """The outcome of embed; ``now`` in a forward."""
        rank = self.local.rank
        inputs = at(rank.batch.inputs, microbatch)
        return ends.embed(rank, rank.ends, inputs, microbatch, now=now)

    def finish(self, y: Tree, microbatch: Any) -> Outcome:
        """The outcome of head and loss in an inference; without a loss, of the user's outputs."""
        rank, take_loss = self.local.rank, self.step.take_loss
        outcome = ends.finish(rank, rank.ends, y, microbatch, take_loss=take_loss)
        if not self.step.logprobs:
            return outcome
        found = logprobs_of(outcome.value, at(rank.batch.targets, microbatch))
        return dataclasses.replace(outcome, value=found)

    def _finish(self, y: Tree, microbatch: Any) -> None:
        """The end of an inference."""
        outcome = self.finish(y, microbatch)
        self.memory.take(outcome, microbatch)
        if not self.step.take_loss:
            self.memory.results[microbatch] = outcome.value

    def _backward(self, op: Op, row: Row) -> Tree:
        local, microbatch = self.local, row["microbatch"]
        if self.memory.residuals is None:
            x = self.given(row, self.operand(op, row))
            again, stage = local.stage_pullback(op.chunk, microbatch, x)
            y = again.value
        else:
            arguments = local.stage_arguments(op.chunk, microbatch)
            stash = self.stashes(op)[row["stash"]]
            stage = self.memory.residuals.backward(*arguments, stash, self._earlier(row))
            y = self.own_output(row, stash)
        dy = self._with_cotangent(row, self._output_gradient(op, row, y))
        if not self.goes_on:
            return self.no_message()
        refs = self.memory.chunk_grads[op.chunk].targets
        dx = stage(dy, refs, want_x=self._wants_given(op))
        return self._upstream(op, row, self._added(row, dx))

    def _input_half(self, op: Op, row: Row) -> Tree:
        halves, microbatch = self.memory.halves, row["microbatch"]
        arguments = self.local.stage_arguments(op.chunk, microbatch)
        dy: Any
        if self.memory.residuals is None:
            stash = self.given(row, self.operand(op, row))
        else:
            stash = self.stashes(op)[row["stash"]]
        if not self.goes_on:  # the last stage's, for what the head has to sum
            again = self.memory.residuals is None
            y = self.local.stage(*arguments, stash).value if again else self.own_output(row, stash)
            self._loss_gradient(y, microbatch)
            return self.no_message()
        if not op.last:
            dy = self._with_cotangent(row, self._arrived(row))
        elif self.memory.residuals is None:
            dy = lambda y: self._with_cotangent(row, self._loss_gradient(y, microbatch))  # noqa: E731
        else:
            dy = self._loss_gradient(self.own_output(row, stash), microbatch)
            dy = self._with_cotangent(row, dy)
        if self.memory.carries is not None and self.memory.residuals is not None:
            stash = stash, self._earlier(row)
        refs = self.memory.chunk_grads[op.chunk].targets
        dx, crossing = halves.input_half(*arguments, stash, dy, refs, want_x=self._wants_given(op))
        self.crossings(op)[row["crossing"]] = crossing
        return self._upstream(op, row, self._added(row, dx))

    def _weight_half(self, op: Op, row: Row) -> Tree:
        arguments = self.local.stage_arguments(op.chunk, row["microbatch"])
        crossing = self.crossings(op)[row["crossing"]]
        refs = self.memory.chunk_grads[op.chunk].targets
        self.memory.halves.weight_half(*arguments, crossing, refs)
        return self.no_message()

    def stashes(self, op: Op) -> Any:
        """The pool of an action's stash: in host memory, or on the device."""
        return self.memory.host_stashes if "stash" in op.host else self.memory.stashes

    def crossings(self, op: Op) -> Any:
        """The pool of an action's crossing, likewise."""
        return self.memory.host_crossings if "crossing" in op.host else self.memory.crossings

    @property
    def goes_on(self) -> bool:
        """True if the gradient for a stage's output is needed."""
        return self.local.goes_back

    def _does_anything(self, op: Op) -> bool:
        """Tell whether an action computes anything; a backward of the last stage takes the loss."""
        if op.kind == "W":
            return self.local.sums_weights
        return op.kind == "F" or op.last or self._wants_x(op) or self.local.sums_weights

    def _wants_x(self, op: Op) -> bool:
        """Tell whether the gradient for a stage's input is needed."""
        return self.local.way.x and (not op.first or self.wants_upstream)

    # --- slices ---

    def _earlier(self, row: Row) -> Tree:
        """The carries of earlier slices, () without slices."""
        carries = self.memory.carries
        return () if carries is None else carries.given(row, ()).earlier

    def _with_cotangent(self, row: Row, dy: Leaves) -> Leaves:
        """The gradients for a stage's output, and with slices for the carry of this one."""
        carries = self.memory.carries
        return dy if carries is None else [*dy, *carries.cotangent(row)]

    def _added(self, row: Row, dx: Leaves) -> Leaves:
        """The gradients for the activation; those for carries of earlier slices are added up."""
        if self.memory.carries is None:
            return dx
        count = len(partition(self.local.activation)[0])
        self.memory.carries.add(row, dx[count:])
        return dx[:count]

    def _wants_given(self, op: Op) -> bool:
        """Tell whether a pullback is to give the gradients for all that a stage was given."""
        return self.memory.carries is not None or self._wants_x(op)

    def _arrived(self, row: Row) -> Leaves:
        """The gradient that the next stage has sent."""
        floats, _ = partition(self.memory.returned[row["gradient"]])
        return floats

    def _upstream(self, op: Op, row: Row, dx: Leaves) -> Tree:
        """Send the gradient of a stage's input upstream: into a message, or through embed."""
        if not op.first:
            return self.as_message(dx) if self.local.way.x else self.no_message()
        if self.wants_upstream:
            _, embed = self.local.embed_pullback(row["microbatch"])
            refs = self.memory.ends_grads.targets
            found = embed(dx, refs, want_x=self.step.want_inputs)
            if self.step.want_inputs:
                self.memory.input_grads[row["microbatch"]] = found
        return self.no_message()

    def own_output(self, row: Row, stash: Any) -> Tree:  # noqa: ARG002  groups look into it
        """The last stage's output, which lies where others find the gradient that has arrived."""
        return self.memory.returned[row["gradient"]]

    def _output_gradient(self, op: Op, row: Row, y: Tree) -> Leaves:
        """The gradient for a stage's output: of the loss, or as the next stage has sent it."""
        return self._loss_gradient(y, row["microbatch"]) if op.last else self._arrived(row)

    def loss_cotangent(self) -> jax.Array:
        """Cotangent of a microbatch's loss."""
        return vary(jnp.full((), self.local.rank.loss.of_loss), self.local.axes)

    def _loss_gradient(self, y: Tree, microbatch: Any) -> Leaves:
        """The gradient for the last stage's output; counts the loss itself."""
        outcome, pullback = self.local.loss_pullback(y, microbatch)
        self.memory.take(outcome, microbatch)
        refs = self.memory.ends_grads.targets
        return pullback([self.loss_cotangent()], refs, want_x=self.goes_on)

    def as_message(self, floats: Leaves) -> Tree:
        """A gradient in the form of an activation; leaves that carry none are zeros."""
        types, axes = self.local.activation, self.local.axes
        _, others = partition(types)
        return combine(types, floats, blank(others, axes))
