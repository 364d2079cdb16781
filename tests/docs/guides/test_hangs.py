"""The guide to hangs: each failure is provoked once more and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.guides.pages import commands, missing, run, write_files

PAGE = "debugging-a-hang.md"
FOUND = commands(PAGE)


def name(line: str) -> str:
    """FAULT=name, or the first word of a command."""
    return line.split(maxsplit=1)[0].removeprefix("FAULT=")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            one,
            id=name(one.line),
            marks=[] if name(one.line) in ("loader", "python") else pytest.mark.exhaustive,
        )
        for one in FOUND
    ],
)
def test_what_is_shown_is_printed(command, tmp_path: Path) -> None:
    assert write_files(PAGE, tmp_path) == ["hang.py"]
    printed = run(command.line, tmp_path)
    assert missing(command, printed) == "", printed


def test_every_fault_of_the_program_is_shown(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    program = (tmp_path / "hang.py").read_text(encoding="utf-8")
    faults = [name(one.line) for one in FOUND]
    for fault in ("none", "loader", "dtype", "killed", "error", "short", "alone", "option"):
        assert f'"{fault}"' in program
        assert faults.count(fault) == 1
