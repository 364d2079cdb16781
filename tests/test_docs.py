"""The examples in docs/schedules.md run as printed, and its tables are what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from schedules import Costs, build, simulate
from tests.sizes import CHUNKS

PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"
COLUMNS = [
    {"clock": "event"},
    {"clock": "lockstep", "pattern": "single"},
    {"clock": "lockstep"},
    {"clock": "lockstep", "partners": True},
]
UNEVEN = Costs(f=1, i=1.2, w=0.8)


def test_every_example_runs_as_printed():
    examples = doctest.DocTestParser().get_doctest(
        PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0
    )
    assert len(examples.examples) >= 10
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=said.append)
    assert "".join(said) == ""


def table() -> list[list[str]]:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[name, *map(str.strip, cells.split("|"))] for name, cells in rows]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_what_lockstep_costs(row):
    name, *cells = row
    V = CHUNKS.get(name, 2 if name in ("interleaved_1f1b", "looped_bfs") else 1)
    schedule = build(name, num_ranks=8, num_microbatches=32, num_stages=8 * V)
    found = [simulate(schedule, **options).efficiency for options in COLUMNS]
    found += [
        simulate(schedule, UNEVEN, **options).efficiency
        for options in (COLUMNS[0], COLUMNS[2], COLUMNS[3])
    ]
    assert [f"{value:.3f}".lstrip("0") for value in found] == cells


def test_the_table_is_found():
    assert len(table()) == 11
