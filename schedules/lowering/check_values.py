"""The values of a program as numbers: what they are called, and who must read which.

The output of a stage for a unit (a microbatch, or a slice of one) is ``(stage * U + unit) *
len(WHAT)`` for U units, the others that belong to it follow; -1 is none. The embedding and the
head's gradient, where ranks share them, are the output and the input gradient of one stage more
than there are. Letters as in `schedules.core.action`.
"""

from __future__ import annotations

import numpy as np

from schedules.core.action import Action, unit_of
from schedules.lowering.program import Program

WHAT = ("output", "input gradient", "residuals", "crossing values")
OUTPUT, GRADIENT, RESIDUALS, CROSSING = range(4)
BEYOND = ("embedding", "head's gradient")  # the same of a "stage K": what ranks share


class SymbolicValues:
    """The values of one program."""

    def __init__(self, program: Program) -> None:
        self._program, self._schedule = program, program.schedule
        self._slices = program.schedule.num_slices
        self.has_embed, self.has_head = ("embed" in program.shared, "head" in program.shared)
        self._hosted = _inputs_on_host(program) if program.keep == "input" else frozenset()

    def output(self, microbatch: int, stage: int | None = None) -> int:
        """A stage's output for a unit; by default the embedding."""
        stage = self._schedule.num_stages if stage is None else stage
        return (stage * self._schedule.num_units + microbatch) * len(WHAT) + OUTPUT

    def name(self, value: int) -> str:
        """The value in words."""
        if value < 0:
            return "nothing"
        item, what = divmod(value, len(WHAT))
        stage, unit = divmod(item, self._schedule.num_units)
        slices = self._schedule.num_slices
        microbatch = f"{unit}" if slices == 1 else f"{unit // slices}, slice {unit % slices}"
        if stage == self._schedule.num_stages:
            return f"the {BEYOND[what]} of microbatch {microbatch}"
        return f"the {WHAT[what]} of stage {stage} for microbatch {microbatch}"

    def reads(self, action: Action) -> tuple[int, int, int, int]:
        """Places that an action must name for operand, gradient, stash and crossing; -1 is the
        trash.
        """
        stage, kind, microbatch = action.stage, action.kind, unit_of(action, self._slices)
        own = self.output(microbatch, stage)
        if kind == "W":
            return -1, -1, -1, own + CROSSING
        before = self.output(microbatch, stage - 1) if stage else -1
        if stage == 0 and self.has_embed:
            before = self.output(microbatch)
        if kind == "F":
            return before, -1, -1, -1
        is_last = stage == self._schedule.num_stages - 1 and not self.has_head
        after = -1 if is_last else self.output(microbatch, stage + 1) + GRADIENT
        if (stage, microbatch) in self._hosted:
            return -1, after, own + RESIDUALS, -1
        if self._program.keep == "input":
            return before, after, -1, -1
        return -1, own if is_last else after, own + RESIDUALS, -1


def _inputs_on_host(program: Program) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of every F that copies its stage's input into host memory."""
    found = set()
    for tick, index, rank in np.argwhere(program.op > 0).tolist():
        op = program.slots[index].ops[program.op[tick, index, rank] - 1]
        if op.kind == "F" and op.stash_on_host:
            stage = program.schedule.stages_of[rank][op.chunk]
            found.add((stage, int(program.microbatch[tick, index, rank])))
    return frozenset(found)
