"""Published numbers: the error of every row is as its table states, and a page has the summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedules import Costs, build, simulate
from tests.published import formulas, gpipe, vocabulary, zero_bubble
from tests.published.table import HEADER, Row, Table
from tests.support.elsewhere import python

PAGE = Path(__file__).parents[2] / "bench" / "notes" / "schedules.md"
TABLES = [one for m in (gpipe, zero_bubble, vocabulary, formulas) for one in m.TABLES]
ROWS = [
    pytest.param(table, row, id=f"{table.source.partition(']')[0][1:]} {table.place}: {row.name}")
    for table in TABLES
    for row in table.rows
]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_a_row_is_as_near_as_its_table_states(table: Table, row: Row) -> None:
    assert table.keeps(row), table.line(row)


@pytest.mark.slow
def test_the_page_has_the_summary() -> None:
    """The planner's two lines come from the command: its rows need a process without jax."""
    done = python("-m", "tests.published", "MaxText", "Megatron")
    assert done.returncode == 0, done.stdout + done.stderr
    planner = done.stdout.rpartition(HEADER)[2].split("\n")[1:3]
    lines = [HEADER, *(table.summary() for table in TABLES), *planner]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("S", "V"), [(2, 2), (3, 2), (4, 3), (8, 4)])
def test_1f1b_i_has_each_message_of_the_first_and_the_last_microbatch_on_its_path(S, V):
    """Table 5 of the zero-bubble paper has S fewer: `tests.published.zero_bubble` says why."""
    one = build("interleaved_1f1b", num_ranks=S, num_microbatches=2 * S, num_stages=V * S)
    free, sent = (simulate(one, Costs(comm=comm)).makespan for comm in (0, 0.01))
    assert sent - free == pytest.approx(0.01 * 2 * (V * S - 1))
