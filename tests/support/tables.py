"""Tables of a lowered program, changed one entry at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from schedules import Program, ScheduleError, check_program
from schedules.lowering.program import COMMON, Table


def tables(program: Program) -> dict[str, Table]:
    """All tables of a program, by name."""
    return program.rank_tables | program.common._asdict()


def with_tables(program: Program, **changed: Table) -> Program:
    """The program with other tables, by name."""
    values = {
        name: placement._replace(table=changed.pop(name, placement.table))
        for name, placement in program.values.items()
    }
    common = {name: changed.pop(name) for name in COMMON if name in changed}
    return replace(program, values=values, common=program.common._replace(**common), **changed)


def assert_no_entry_can_change(
    program: Program, columns: Iterable[str], *, lowest: int = -1
) -> None:
    """Assert that every other value of every entry makes the program wrong.

    Args:
      program: a legal one.
      columns: names of its tables.
      lowest: the first value to try; the last is one more than the table's largest.
    """
    for column in columns:
        table = tables(program)[column]
        for at in np.ndindex(table.shape):
            for value in range(lowest, int(table.max()) + 2):
                if value != table[at]:
                    changed = table.copy()
                    changed[at] = value
                    with pytest.raises(ScheduleError, match=r"^program of schedule"):
                        check_program(with_tables(program, **{column: changed}))
