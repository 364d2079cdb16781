"""docs/split.md has a row for every model of the lane, with the lines of glue as counted."""

from __future__ import annotations

import re
from pathlib import Path

from tests.zoo.test_zoo import ENTRIES

PAGE = (Path(__file__).parents[2] / "docs" / "split.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|`]+) \| `([\w-]+)` ([\d.]+) \| (\d+) \| (\S+) \|", PAGE, re.MULTILINE)


def test_every_model_has_a_row() -> None:
    assert [(name, package) for name, package, *_ in ROWS] == [
        (entry.name, entry.package) for entry in ENTRIES
    ]


def test_rows_count_the_glue() -> None:
    assert [int(row[3]) for row in ROWS] == [entry.lines for entry in ENTRIES]


def test_requirements_name_every_package() -> None:
    here = Path(__file__).parent
    listed = (here / "requirements.txt").read_text() + (here / "alone.txt").read_text()
    assert {entry.package for entry in ENTRIES} <= set(listed.split("\n"))
