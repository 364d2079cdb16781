"""The values that a backward starts from: the stage's input, or residuals that F stashes.

With ``keep="input"`` a backward runs the forward again from the stage's input. The input is a
message, or a copy that F stashes if the program says so. Only the last stage's backward needs the
last stage's output, so its F does nothing. With ``keep="residuals"`` a backward starts from the
residuals that F stashed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.base.tree import Leaves, Tree
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.slices import WholeSequences
from pipeline.core.step.stores.store import Row, Stores
from schedules.lowering.program import Op

TakeCotangent = Callable[[Tree], Leaves]  # from a stage's output to the gradients for the output


class SavedInput:
    """Backwards that start from the stage's input and run its forward again.

    Args:
      local: the rank's part of the model, or a group of its stages.
      stores: the storage of values between actions.
      slices: the carries between slices of sequences.
      operand: a function of op and row that returns a stage's input.
    """

    recomputes = True
    residuals: Any = None

    def __init__(
        self,
        local: LocalModel,
        stores: Stores,
        slices: WholeSequences,
        operand: Callable[[Op, Row], Tree],
    ) -> None:
        self.local, self.stores, self.slices, self.operand = local, stores, slices, operand

    def begin(self, op: Op, row: Row) -> None:
        """Stash a copy of a forward's input, if its backward does not read the message."""
        if self.stores.stashes_input(op):
            self.stores.write("stash", op, row, self.operand(op, row))

    def forward(self, op: Op, row: Row, x: Tree) -> Outcome:
        """Call a stage."""
        return self.local.stage(
            *self.local.stage_arguments(op.chunk, row["microbatch"], now=True), x
        )

    def read(self, op: Op, row: Row) -> Tree:
        """Read the stage's input, from which a backward starts."""
        stashed = self.stores.stashes_input(op)
        x = self.stores.read("stash", op, row) if stashed else self.operand(op, row)
        # Carries of earlier slices have other places, and are never stashed with the input.
        return self.slices.input(row, x)

    def pullback(self, op: Op, row: Row) -> tuple[Tree, Pullback]:
        """Run a second forward; return the stage's output and pullback."""
        x = self.read(op, row)
        again, pullback = self.local.stage_pullback(op.chunk, row["microbatch"], x)
        return again.value, pullback

    def output(self, row: Row, saved: Tree, arguments: Any) -> Tree:  # noqa: ARG002
        """Compute the output of a stage without its pullback."""
        weights, fixed, side = arguments
        return self.local.stage(weights, fixed, side, saved).value

    def of_half(self, op: Op, row: Row, saved: Tree, take: TakeCotangent) -> tuple[Tree, Any]:  # noqa: ARG002
        """Return the input of I and its cotangent; for the last stage, ``take`` as cotangent."""
        # I runs the stage again, and so computes the last stage's output. The cotangent is passed
        # as a function of this output, which saves a forward for the loss.
        return saved, take if op.last else take(None)


class SavedResiduals(SavedInput):
    """Backwards that start from the residuals of their forward.

    Args:
      residuals: the stage's pullback, split into forward and backward.
      others: the arguments of `SavedInput`.
    """

    recomputes = False

    def __init__(self, residuals: Any, *others: Any) -> None:
        super().__init__(*others)
        self.residuals = residuals

    def begin(self, op: Op, row: Row) -> None:
        """Do nothing: `forward` makes and stashes the residuals."""

    def forward(self, op: Op, row: Row, x: Tree) -> Outcome:
        """Call a stage, and stash its residuals."""
        arguments = *self.local.stage_arguments(op.chunk, row["microbatch"], now=True), x
        outcome, stash = self.residuals.forward(*arguments)
        self.stores.write("stash", op, row, stash)
        return outcome

    def read(self, op: Op, row: Row) -> Tree:
        """Read the residuals, from which a backward starts."""
        return self.stores.read("stash", op, row)

    def pullback(self, op: Op, row: Row) -> tuple[Tree, Pullback]:
        """Return the stage's output (None unless it is the last stage) and its pullback."""
        arguments = self.local.stage_arguments(op.chunk, row["microbatch"])
        stash = self.read(op, row)
        # A stage's arguments are not stashed: weights, keys, extras and the carries of earlier
        # slices are passed again.
        pullback = self.residuals.backward(*arguments, stash, self.slices.earlier(row))
        return self.output(row, stash, arguments) if op.last else None, pullback

    def output(self, row: Row, saved: Tree, arguments: Any) -> Tree:  # noqa: ARG002
        """Read the last stage's output."""
        # The last stage receives no gradient, so the place of its gradient holds the output: F
        # stores it there through a channel of shift 0. If no message has the output's type, the
        # output is stashed with the residuals.
        if self.residuals.holds_output:
            return self.residuals.output(saved)
        return self.stores.device["gradient"][row["gradient"]]

    def of_half(self, op: Op, row: Row, saved: Tree, take: TakeCotangent) -> tuple[Tree, Any]:
        """Return the residuals for I, with carries of earlier slices, and the cotangent of I."""
        dy = take(self.output(row, saved, ()) if op.last else None)
        return (saved, self.slices.earlier(row)) if self.slices.has_carries else saved, dy
