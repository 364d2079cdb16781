"""The values of a program as numbers: their names, and the values that actions must read.

The output of a stage for a unit (a microbatch, or a slice of one) is ``(stage * U + unit) *
len(WHAT)`` for U units; the unit's other values have the next numbers; -1 means no value. If ranks
share the embedding and the head, the embedding and the head's gradient are the output and the input
gradient of an additional stage K.
"""

from __future__ import annotations

import numpy as np

from schedules.core.action import Action, unit_of
from schedules.lowering.kinds import kinds_of
from schedules.lowering.program import Program

WHAT = ("output", "input gradient", "residuals", "crossing values", "carry", "carry gradient")
OUTPUT, GRADIENT, RESIDUALS, CROSSING, CARRY, CARRY_GRADIENT = range(6)
BEYOND = ("embedding", "head's gradient")  # the names for stage K: values of shared ends


class SymbolicValues:
    """The values of one program."""

    def __init__(self, program: Program) -> None:
        self._program, self._schedule = program, program.schedule
        self._slices = program.schedule.num_slices
        # The places that an action names: one for each kind of values; for carries, one a slice.
        self.entries = [
            (kind, n)
            for kind in kinds_of(self._slices)
            for n in range(self._slices if kind.per_slice else 1)
        ]
        self.has_embed, self.has_head = ("embed" in program.shared, "head" in program.shared)
        self._hosted = _inputs_on_host(program) if program.keep == "input" else frozenset()

    def output(self, microbatch: int, stage: int | None = None) -> int:
        """Return the number of a stage's output for a unit; by default of the embedding."""
        stage = self._schedule.num_stages if stage is None else stage
        return (stage * self._schedule.num_units + microbatch) * len(WHAT) + OUTPUT

    def name(self, value: int) -> str:
        if value < 0:
            return "nothing"
        item, what = divmod(value, len(WHAT))
        stage, unit = divmod(item, self._schedule.num_units)
        slices = self._schedule.num_slices
        microbatch = f"{unit}" if slices == 1 else f"{unit // slices}, slice {unit % slices}"
        if stage == self._schedule.num_stages:
            return f"the {BEYOND[what]} of microbatch {microbatch}"
        return f"the {WHAT[what]} of stage {stage} for microbatch {microbatch}"

    def reads(self, action: Action) -> list[int]:
        """Return [entries] the value that an action must find in each place, -1 for none."""
        # An input comes from the previous stage, or from all ranks; a gradient from the next stage.
        stage, unit = action.stage, unit_of(action, self._slices)
        own, part, last = self.output(unit, stage), unit % self._slices, self._slices - 1
        keeps_residuals = self._program.keep == "residuals"
        before = self.output(unit, stage - 1) if stage else -1
        if stage == 0 and self.has_embed:
            before = self.output(unit)
        after = self.output(unit, stage + 1) + GRADIENT
        if stage == self._schedule.num_stages - 1 and not self.has_head:
            after = own if keeps_residuals else -1
        # A backward reads the stash if F has left one, else the input.
        from_stash = action.kind != "F" and (keeps_residuals or (stage, unit) in self._hosted)
        slices = self._outputs_of_slices(stage, unit)
        # Later slices read a carry. The last slice's backward writes its gradient, which the
        # backwards
        # of the other slices read, down to the carry's own slice.
        values = {
            "operand": [-1 if from_stash else before],
            "gradient": [after],
            "stash": [own + RESIDUALS if from_stash else -1],
            "crossing": [own + CROSSING],
            "carry": [c + CARRY if n < part else -1 for n, c in enumerate(slices)],
            "carry_gradient": [
                c + CARRY_GRADIENT if n <= part < last else -1 for n, c in enumerate(slices)
            ],
        }
        return [
            values[kind.name][n] if action.kind in kind.reads else -1 for kind, n in self.entries
        ]

    def writes(self, action: Action) -> list[int]:
        """Return [entries] the value that an action writes to each place; -1 if it is not read."""
        unit = unit_of(action, self._slices)
        own, part, last = self.output(unit, action.stage), unit % self._slices, self._slices - 1
        slices = self._outputs_of_slices(action.stage, unit)
        values = {
            "stash": [own + RESIDUALS],
            "crossing": [own + CROSSING],
            "carry": [c + CARRY if n == part else -1 for n, c in enumerate(slices)],
            "carry_gradient": [c + CARRY_GRADIENT if part == last else -1 for c in slices],
        }
        return [
            values[kind.name][n] if action.kind in kind.writes else -1 for kind, n in self.entries
        ]

    def _outputs_of_slices(self, stage: int, unit: int) -> list[int]:
        """Return [N] a stage's outputs for all slices of a unit's microbatch."""
        first = self.output(unit - unit % self._slices, stage)
        return [first + n * len(WHAT) for n in range(self._slices)]


def _inputs_on_host(program: Program) -> frozenset[tuple[int, int]]:
    """Find (stage, microbatch) of every F that copies its stage's input into host memory."""
    inputs = set()
    for tick, index, rank in np.argwhere(program.op > 0).tolist():
        op = program.slots[index].ops[program.op[tick, index, rank] - 1]
        if op.kind == "F" and "stash" in op.host:
            stage = program.schedule.stages_of[rank][op.chunk]
            inputs.add((stage, int(program.microbatch[tick, index, rank])))
    return frozenset(inputs)
