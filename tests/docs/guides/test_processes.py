"""The guides to many processes: their programs, what consoles show, and the errors they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipeline
from tests.docs.guides.pages import GUIDES, commands, missing, run, write_files


@pytest.mark.slow
def test_one_and_two_processes_print_the_same_losses(tmp_path: Path) -> None:
    assert write_files("processes.md", tmp_path) == ["train.py"]
    found = commands("processes.md")
    assert len(found) == 2
    for command in found:
        printed = run(command.line, tmp_path)
        assert missing(command, printed) == "", printed


def test_what_is_not_printed_is_found() -> None:
    first = commands("processes.md")[0]
    assert missing(first, "\n".join(first.shown)) == ""
    assert missing(first, "\n".join(first.shown[::-1])) == first.shown[1]


def test_errors_of_the_table_are_those_of_the_code() -> None:
    text = (GUIDES / "processes.md").read_text(encoding="utf-8")
    table = text[text.index("| it says |") :]
    rows = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(rows) == 16
    package = Path(pipeline.__file__).parent  # in the checkout or in site-packages
    code = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    assert [part for row in rows for part in row.split("...") if part.strip() not in code] == []
