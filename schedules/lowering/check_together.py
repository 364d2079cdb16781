"""A symbolic run of the work that all ranks do together.

Ranks run the head right after the slot in which the last stage returns an output, and the
embedding's gradient right after the slot in which the first stage returns its input's gradient.

Letters are those of `schedules.core.action`, values are those of `schedules.lowering.check_values`.
"""

from __future__ import annotations

from schedules.lowering.check_tables import Place, fail
from schedules.lowering.check_values import GRADIENT, WHAT, SymbolicValues
from schedules.lowering.program import Program


class Common:
    """The common work of a program.

    Args:
      program: a program with well-formed tables.
      values: the program's values as numbers.
    """

    def __init__(self, program: Program, values: SymbolicValues) -> None:
        self.program, self._values = program, values
        self.tables = {name: t.tolist() for name, t in program.common._asdict().items()}

    def work(self, tick: int, slot: int, results: list[int]) -> None:
        """Check that all ranks work on a value exactly in the slot that returns it.

        Args:
          tick: the tick of the slot.
          slot: the slot; ranks work together after its actions.
          results: [S + 1] the value that each rank returns in the slot; the last stage's output
            becomes the head's gradient.
        """
        schedule = self.program.schedule
        last = schedule.num_stages - 1
        if self._values.has_head:
            rank = schedule.placement[last]
            output = results[rank] - self._values.output(0, last)
            if self._see("head", "output of the last stage", output, (tick, slot, rank)):
                results[rank] += self._values.output(0, 1) + GRADIENT
        rank = schedule.placement[0]
        gradient = results[rank] - GRADIENT if self._values.has_embed else -1
        self._see("scatter", "gradient of the first stage", gradient, (tick, slot, rank))

    def _see(self, name: str, what: str, value: int, at: Place) -> bool:
        """Tell whether a rank has returned a microbatch's value; check that the table agrees."""
        microbatch, rest = divmod(value, len(WHAT))
        there = not rest and 0 <= microbatch < self.program.schedule.num_units
        wanted = microbatch if there else -1
        entry = self.tables[name][at[0]][at[1]]
        if entry != wanted:
            text = f"of microbatch {wanted} is there" if there else "is not there"
            text = f"the {what} {text}: expected {wanted}, found {entry}"
            fail(self.program, f"table {name!r}, {text}", at)
        return there
