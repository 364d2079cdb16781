"""The README's example runs as printed; it is on the first screen, and what it leads to is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import schedules
from schedules.families import SLICED
from schedules.tools.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAMILIES = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
DEVICES = 4


@pytest.mark.slow
def test_the_first_example_runs_on_four_virtual_devices(tmp_path: Path) -> None:
    match = re.search(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert match, "README.md has no ```python block"
    example = match[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_PLATFORMS": "cpu",
        # The packages under test, installed or not.
        "PYTHONPATH": str(Path(schedules.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_first_screen_has_two_commands_a_picture_and_an_example() -> None:
    """In this order, before any heading."""
    screen = README.partition("\n## ")[0]
    commands, picture, example = (screen.index(part) for part in ("\nmake ", "![", "```python"))
    assert commands < picture < example
    assert len(re.findall(r"^make \w+ ", screen, re.MULTILINE)) == 2
    assert screen.count("\n", 0, example) <= 25


def test_the_table_of_schedules_lists_every_family_and_no_other() -> None:
    section = FAMILIES.partition("\n## Families\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted((*schedules.names(), *SLICED))


def test_the_commands_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m schedules ([^#\n]*)", FAMILIES, re.MULTILINE)
    assert len(commands) == 3
    assert [main(shlex.split(command)) for command in commands] == [0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "best.csv"}
