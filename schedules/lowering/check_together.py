"""A symbolic run of the work that all ranks do together.

That is the head of what the last stage has just returned, and the embedding's gradient of what the
first has.

Letters as in `schedules.core.action`, values as in `schedules.lowering.check_values`.
"""

from __future__ import annotations

from schedules.lowering.check_tables import Place, fail
from schedules.lowering.check_values import GRADIENT, WHAT, SymbolicValues
from schedules.lowering.program import Program


class Common:
    """The common work of a program.

    Args:
      program: whose tables are well formed.
      values: its values.
    """

    def __init__(self, program: Program, values: SymbolicValues) -> None:
        self.program, self._values = program, values
        self.tables = {name: t.tolist() for name, t in program.common._asdict().items()}

    def work(self, tick: int, slot: int, results: list[int]) -> None:
        """See that all ranks work on what is there, and exactly then.

        Args:
          tick: when.
          slot: when.
          results: [S + 1] what each rank has just made; the last stage's becomes the head's
            gradient.
        """
        schedule = self.program.schedule
        last = schedule.num_stages - 1
        if self._values.has_head:
            rank = schedule.placement[last]
            made = results[rank] - self._values.output(0, last)
            if self._see("head", "output of the last stage", made, (tick, slot, rank)):
                results[rank] += self._values.output(0, 1) + GRADIENT
        rank = schedule.placement[0]
        made = results[rank] - GRADIENT if self._values.has_embed else -1
        self._see("scatter", "gradient of the first stage", made, (tick, slot, rank))

    def _see(self, name: str, what: str, made: int, at: Place) -> bool:
        """Tell whether a microbatch's value has just been made, and the table agrees."""
        microbatch, rest = divmod(made, len(WHAT))
        there = not rest and 0 <= microbatch < self.program.schedule.num_units
        wanted = microbatch if there else -1
        found = self.tables[name][at[0]][at[1]]
        if found != wanted:
            text = f"of microbatch {wanted} is there" if there else "is not there"
            text = f"the {what} {text}: expected {wanted}, found {found}"
            fail(self.program, f"table {name!r}, {text}", at)
        return there
