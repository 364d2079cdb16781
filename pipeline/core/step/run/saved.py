"""The values that a backward starts from: the stage's input, or residuals that F stashes.

With ``keep="input"`` a backward runs the forward again from the stage's input. The input is a
message, or a copy that F stashes if the program says so. Only the last stage's backward needs the
last stage's output, so its F does nothing. With ``keep="residuals"`` a backward starts from the
residuals that F stashed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.base.tree import Tree
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.autodiff.residuals import Residuals
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.stores.slices import Carries
from pipeline.core.step.stores.store import Row, Stores
from schedules.lowering.program import Op


@dataclass(frozen=True, eq=False)
class Saved:
    """The calls of a stage by F, and what its backward starts from.

    Attributes:
      residuals: the stage's pullback, split into forward and backward; None if backwards run the
        forward again.
      operand: a function of op and row that returns the stage's input.
    """

    kind: StageKind
    residuals: Residuals | None
    stores: Stores
    slices: Carries
    operand: Callable[[Op, Row], Tree]

    def begin(self, op: Op, row: Row) -> None:
        """Stash a copy of a forward's input, if its backward does not read the message."""
        if self.residuals is None and self.stores.stashes_input(op):
            self.stores.write("stash", op, row, self.operand(op, row))

    def forward(self, op: Op, row: Row, x: Tree) -> Outcome:
        """Call the stage, and stash its residuals."""
        arguments = self.kind.arguments(op.chunk, row["microbatch"], now=True)
        if self.residuals is None:
            return self.kind.stage(*arguments, x)
        outcome, stash = self.residuals.forward(*arguments, x)
        self.stores.write("stash", op, row, stash)
        return outcome

    def start(self, op: Op, row: Row) -> Any:
        """Read what a backward starts from: the input, or residuals and earlier carries."""
        # Carries of earlier slices have other places, and are never stashed.
        if self.residuals is not None:
            return self.stores.read("stash", op, row), self.slices.earlier(row)
        stashed = self.stores.stashes_input(op)
        x = self.stores.read("stash", op, row) if stashed else self.operand(op, row)
        return self.slices.input(row, x)

    def pullback(self, op: Op, row: Row) -> tuple[Tree, Pullback]:
        """Return the pullback, and the last stage's output (for other stages it may be None)."""
        of_call = op.chunk, row["microbatch"]
        if self.residuals is None:
            x = self.start(op, row)
            again, pullback = self.kind.linearize(*self.kind.arguments(*of_call), x)
            return again.value, pullback
        # A stage's arguments are not stashed: weights, keys, extras and the carries of earlier
        # slices are passed again.
        arguments = self.kind.arguments(*of_call)
        start = self.start(op, row)
        pullback = self.residuals.backward(*arguments, *start)
        return self.output(row, start, arguments) if op.last else None, pullback

    def output(self, row: Row, start: Any, arguments: Any) -> Tree:
        """Return the last stage's output, without its pullback."""
        if self.residuals is None:
            weights, fixed, side = arguments
            return self.kind.stage(weights, fixed, side, start).value
        # The last stage receives no gradient, so the place of its gradient holds the output: F
        # stores it there through a channel of shift 0.
        if self.residuals.holds_output:
            return self.residuals.output(start[0])
        return self.stores.device["gradient"][row["gradient"]]
