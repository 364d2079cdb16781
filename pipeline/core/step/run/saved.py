"""The values that a backward starts from: the stage's input, or residuals that F stashes.

A backward that has the stage's input (``keep="input"``) runs the forward again, so the last stage's
forward, whose output only its own backward needs, does nothing. With ``keep="residuals"`` it starts
from what the forward stashed. The input is a message or, where the program has it elsewhere, a copy
that F stashes.
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

TakeCotangent = Callable[[Tree], Leaves]  # from a stage's output to the gradients for it


class SavedInput:
    """A backward runs its stage's forward again.

    Args:
      local: the rank's part of the model, or a group of its stages.
      stores: where values are.
      slices: what slices of sequences leave for one another.
      operand: gives a stage's input, by op and row.
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
        """The outcome of a stage."""
        return self.local.stage(
            *self.local.stage_arguments(op.chunk, row["microbatch"], now=True), x
        )

    def read(self, op: Op, row: Row) -> Tree:
        """The value that a backward starts from: the stage's input."""
        stashed = self.stores.stashes_input(op)
        x = self.stores.read("stash", op, row) if stashed else self.operand(op, row)
        # Carries of earlier slices have places of their own, and are never stashed with the input.
        return self.slices.input(row, x)

    def pullback(self, op: Op, row: Row) -> tuple[Tree, Pullback]:
        """The output of a stage and the stage's pullback, by a second forward."""
        x = self.read(op, row)
        again, pullback = self.local.stage_pullback(op.chunk, row["microbatch"], x)
        return again.value, pullback

    def output(self, row: Row, saved: Tree, arguments: Any) -> Tree:  # noqa: ARG002
        """The output of a stage alone."""
        weights, fixed, side = arguments
        return self.local.stage(weights, fixed, side, saved).value

    def of_half(self, op: Op, row: Row, saved: Tree, take: TakeCotangent) -> tuple[Tree, Any]:  # noqa: ARG002
        """The values that I starts from, and its cotangent or, on the last stage, ``take``."""
        # I runs the stage again, so the last stage's output appears within it: the cotangent is a
        # function of that output, which spares a forward for the loss alone.
        return saved, take if op.last else take(None)


class SavedResiduals(SavedInput):
    """A backward starts from the residuals of its forward.

    Args:
      residuals: the stage's pullback, taken apart.
      others: the arguments of `SavedInput`.
    """

    recomputes = False

    def __init__(self, residuals: Any, *others: Any) -> None:
        super().__init__(*others)
        self.residuals = residuals

    def begin(self, op: Op, row: Row) -> None:
        """Do nothing: the forward itself makes the residuals that are stashed."""

    def forward(self, op: Op, row: Row, x: Tree) -> Outcome:
        """The outcome of a stage, whose residuals are stashed."""
        arguments = *self.local.stage_arguments(op.chunk, row["microbatch"], now=True), x
        outcome, stash = self.residuals.forward(*arguments)
        self.stores.write("stash", op, row, stash)
        return outcome

    def read(self, op: Op, row: Row) -> Tree:
        """The values that a backward starts from: the residuals."""
        return self.stores.read("stash", op, row)

    def pullback(self, op: Op, row: Row) -> tuple[Tree, Pullback]:
        """The output of the last stage, None of others, and the stage's pullback."""
        arguments = self.local.stage_arguments(op.chunk, row["microbatch"])
        stash = self.read(op, row)
        # Arguments of a stage are not stashed: weights, keys and extras are passed again, and so
        # are the carries of earlier slices.
        pullback = self.residuals.backward(*arguments, stash, self.slices.earlier(row))
        return self.output(row, stash, arguments) if op.last else None, pullback

    def output(self, row: Row, saved: Tree, arguments: Any) -> Tree:  # noqa: ARG002
        """The last stage's output."""
        # No gradient arrives at the last stage, so the place of its gradient holds the output: F
        # stores it there by a channel of shift 0. Where no message has the output's type, the
        # output is stashed with the residuals.
        if self.residuals.holds_output:
            return self.residuals.output(saved)
        return self.stores.device["gradient"][row["gradient"]]

    def of_half(self, op: Op, row: Row, saved: Tree, take: TakeCotangent) -> tuple[Tree, Any]:
        """The values that I starts from, carries of earlier slices included, and its cotangent."""
        dy = take(self.output(row, saved, ()) if op.last else None)
        return (saved, self.slices.earlier(row)) if self.slices.has_carries else saved, dy
