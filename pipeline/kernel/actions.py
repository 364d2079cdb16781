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

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.backward.accumulate import as_summed
from pipeline.backward.masks import chosen
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition
from pipeline.kernel.memory import Pool, Total, at_most_once
from pipeline.model.loss import same_over_others
from pipeline.rank.cell import Cell
from schedules.lowering.program import Op, Program, Slot

Row = Mapping[str, Any]


class Actions:
    """What a rank can do during a step, and the memory it does it in.

    Args:
      cell: the rank's part of the model.
      program: what will run; a program without backward is an inference.
      take_loss: whether a forward's results are losses rather than outputs.
      want_inputs: whether gradients for the inputs' float leaves are kept.
      masked: whether everything is computed unconditionally: stashes and crossings then need a
        trash place, and gradients are formed by value.

    Attributes:
      buffers: messages, by place.
      loss: totals of the loss and of its weight.
      chunk_grads: [V] totals, and ends_grads, totals for embed and head.
      results: [M, b, ...] outputs of an inference.
      input_grads: [M, b, ...] gradients for the inputs' float leaves.
      halves: a stage's backward in two, if the program splits any.
    """

    def __init__(
        self,
        cell: Cell,
        program: Program,
        *,
        take_loss: bool,
        want_inputs: bool = False,
        masked: bool = False,
    ) -> None:
        self.training = not program.schedule.is_forward
        num_microbatches = program.schedule.num_microbatches
        self._make_totals(cell, num_microbatches, take_loss=take_loss, want_inputs=want_inputs)
        axes = cell.axes
        self.residuals: Any = None
        if self.training and program.keep == "residuals":
            self.residuals = cell.residuals()
        self.buffers: Any = Pool(cell.wire, program.num_buffers + 1, axes, "messages")
        self.returned: Any = self.buffers  # the same, read as what a stage returns
        stashed = self.residuals.stashed if self.residuals else []
        self.stashes: Any = Pool(stashed, program.num_stashes + masked, axes, "stashes")
        is_split = any(op.kind in "IW" for slot in program.slots for op in slot.ops)
        self.halves: Any = None
        if is_split:
            self.halves = cell.split_backward(self.residuals, in_place=not masked)
        crossing = self.halves.crossing if self.halves else []
        places = program.num_crossings + masked
        self.crossings: Any = Pool(crossing, places, axes, "crossings")
        outputs = [] if take_loss else self._output_types()
        self.results = Pool(outputs, num_microbatches, axes, "kept")

    def _make_totals(
        self, cell: Cell, num_microbatches: int, *, take_loss: bool, want_inputs: bool
    ) -> None:
        """What a step adds up, whatever runs it."""
        self.cell, self.take_loss, self.want_inputs = cell, take_loss, want_inputs
        axes = cell.axes
        self.loss = Total([jnp.zeros(()), jnp.zeros(())], axes)
        trained, summed, ends = cell.model.trained, cell.model.grad_dtype, cell.ends_weights
        self.chunk_grads: list[Any] = [
            Total(as_summed(chosen(w, mask), summed) if self.training else [], axes)
            for w, mask in zip(cell.weights, trained.chunks, strict=True)
        ]
        ends = chosen(ends, trained.ends)
        self.ends_grads = Total(as_summed(ends, summed) if self.training else [], axes)
        floats, _ = partition(at(cell.batch.inputs, 0))
        self.input_grads = Pool(floats if want_inputs else [], num_microbatches, axes, "kept")

    def _output_types(self) -> Tree:
        cell = self.cell
        y = blank(cell.output, cell.axes)
        found = jax.eval_shape(lambda: cell.outputs(cell.ends_weights, y, 0))
        who = "head" if cell.model.has_head else "the last stage"
        return same_over_others(who, found, cell.axes)

    @property
    def wants_upstream(self) -> bool:
        """Whether anybody needs the gradient for stage 0's input."""
        return self.want_inputs or self.cell.model.trained.embed

    def run_slot(self, slot: Slot, row: Row, message: Tree = None) -> Tree:
        """Do the slot's action, if this rank has one; returns its message, or else ``message``."""
        message = self.no_message() if message is None else message
        for branch, op in enumerate(slot.ops, start=1):
            if not self._does_anything(op):
                continue
            action = functools.partial(self._run, op, row)
            with jax.named_scope(op.label):
                message = at_most_once(row["op"] == branch, action, message)
        return message

    def _run(self, op: Op, row: Row) -> Tree:
        return {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_half,
            "W": self._weight_half,
        }[op.kind](op, row)

    def no_message(self) -> Tree:
        """What an action that has nothing to say sends."""
        return blank(self.cell.wire, self.cell.axes)

    def sent(self, y: Tree) -> Tree:
        """An output in the form of a message."""
        return y

    def _forward(self, op: Op, row: Row) -> Tree:
        if self.training and op.last and self.residuals is None:
            return self.no_message()
        cell, microbatch = self.cell, row["microbatch"]
        arguments = *cell.stage_arguments(op.chunk, microbatch), self.operand(op, row)
        if self.residuals is None:
            y = cell.stage(*arguments)
        else:
            y, self.stashes[row["stash"]] = self.residuals.forward(*arguments)
        if op.last and not self.training:
            self._finish(y, microbatch)
        return self.sent(y)

    def operand(self, op: Op, row: Row) -> Tree:
        """A stage's input: from its message, or made from the user's inputs."""
        if not op.first:
            return self.buffers[row["operand"]]
        microbatch = row["microbatch"]
        inputs = at(self.cell.batch.inputs, microbatch)
        return self.cell.embed(self.cell.ends_weights, inputs, microbatch)

    def _finish(self, y: Tree, microbatch: Any) -> None:
        """The end of an inference: a loss, or outputs."""
        cell = self.cell
        if self.take_loss:
            self.loss.add(list(cell.loss(cell.ends_weights, y, microbatch)))
        else:
            self.results[microbatch] = cell.outputs(cell.ends_weights, y, microbatch)

    def _backward(self, op: Op, row: Row) -> Tree:
        cell, microbatch = self.cell, row["microbatch"]
        if self.residuals is None:
            y, stage = cell.stage_pullback(op.chunk, microbatch, self.operand(op, row))
        else:
            arguments = cell.stage_arguments(op.chunk, microbatch)
            stage = self.residuals.backward(*arguments, self.stashes[row["stash"]])
            y = self.own_output(row)
        dy = self._output_gradient(op, row, y)
        if not self.goes_on:
            return self.no_message()
        dx = stage(dy, self.chunk_grads[op.chunk].refs, want_x=self._wants_x(op))
        return self._upstream(op, row, dx)

    def _input_half(self, op: Op, row: Row) -> Tree:
        halves, microbatch = self.halves, row["microbatch"]
        arguments = self.cell.stage_arguments(op.chunk, microbatch)
        dy: Any
        if self.residuals is None:
            stash = self.operand(op, row)
        else:
            stash = self.stashes[row["stash"]]
        if not self.goes_on:  # the last stage's, for what the head has to sum
            again = self.residuals is None
            y = self.cell.stage(*arguments, stash) if again else self.own_output(row)
            self._loss_gradient(y, microbatch)
            return self.no_message()
        if not op.last:
            dy = self._arrived(row)
        elif self.residuals is None:
            dy = functools.partial(self._loss_gradient, microbatch=microbatch)
        else:
            dy = self._loss_gradient(self.own_output(row), microbatch)
        refs = self.chunk_grads[op.chunk].refs
        dx, self.crossings[row["crossing"]] = halves.input_half(
            *arguments, stash, dy, refs, want_x=self._wants_x(op)
        )
        return self._upstream(op, row, dx)

    def _weight_half(self, op: Op, row: Row) -> Tree:
        arguments = self.cell.stage_arguments(op.chunk, row["microbatch"])
        crossing = self.crossings[row["crossing"]]
        self.halves.weight_half(*arguments, crossing, self.chunk_grads[op.chunk].refs)
        return self.no_message()

    @property
    def goes_on(self) -> bool:
        """Whether anybody needs the gradient for a stage's output."""
        return self.cell.way.is_any

    def _does_anything(self, op: Op) -> bool:
        """Whether an action has anything to do; a backward of the last stage takes the loss."""
        if op.kind == "W":
            return any(self.cell.way.weights)
        return op.kind == "F" or op.last or self._wants_x(op) or any(self.cell.way.weights)

    def _wants_x(self, op: Op) -> bool:
        """Whether anybody needs the gradient for a stage's input."""
        return self.cell.way.x and (not op.first or self.wants_upstream)

    def _arrived(self, row: Row) -> Leaves:
        """The gradient that the next stage has sent."""
        floats, _ = partition(self.returned[row["gradient"]])
        return floats

    def _upstream(self, op: Op, row: Row, dx: Leaves) -> Tree:
        """Where the gradient for a stage's input goes: into a message, or through embed."""
        if not op.first:
            return self.as_message(dx) if self.cell.way.x else self.no_message()
        if self.wants_upstream:
            _, embed = self.cell.embed_pullback(row["microbatch"])
            found = embed(dx, self.ends_grads.refs, want_x=self.want_inputs)
            if self.want_inputs:
                self.input_grads[row["microbatch"]] = found
        return self.no_message()

    def own_output(self, row: Row) -> Tree:
        """The last stage's output, which lies where others find the gradient that has arrived."""
        return self.returned[row["gradient"]]

    def _output_gradient(self, op: Op, row: Row, y: Tree) -> Leaves:
        """The gradient for a stage's output: of the loss, or as the next stage has sent it."""
        return self._loss_gradient(y, row["microbatch"]) if op.last else self._arrived(row)

    def _loss_gradient(self, y: Tree, microbatch: Any) -> Leaves:
        """The gradient for the last stage's output; counts the loss itself."""
        total, weight, pullback = self.cell.loss_pullback(y, microbatch)
        self.loss.add([total, weight])
        return pullback(self.cell.loss_cotangent(), self.ends_grads.refs, want_x=self.goes_on)

    def as_message(self, floats: Leaves) -> Tree:
        """A gradient in the form of an activation; leaves that carry none are zeros."""
        types, axes = self.cell.activation, self.cell.axes
        _, others = partition(types)
        return combine(types, floats, blank(others, axes))
