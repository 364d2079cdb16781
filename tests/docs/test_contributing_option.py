"""CONTRIBUTING.md: its example option, added to a copy of the package as it is written there."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

import pipeline
from tests.support.elsewhere import python

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("## An option in five minutes")[2]
TEXT = TEXT.partition("\n## ")[0]
STEPS = re.split(r"^\d\. ", TEXT, flags=re.MULTILINE)[1:]


def blocks(step: str, language: str) -> list[str]:
    """The blocks of a step in a language, at the margin."""
    found = re.findall(rf"^   ```{language}\n(.*?)^   ```", step, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) for block in found]


def edits() -> dict[str, list[tuple[str, str]]]:
    """By file, the text that each edit replaces and the new one."""
    found: dict[str, list[tuple[str, str]]] = {}
    for step in STEPS:
        for block in blocks(step, "diff"):
            lines = block.splitlines()
            before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            (file,) = dict.fromkeys(re.findall(r"`(pipeline/[\w/]+\.py)`", step.split("```")[0]))
            found.setdefault(file, []).append((before, after))
    return found


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the packages with the option."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for package in ("collectives", "pipeline", "schedules"):
        source = Path(pipeline.__file__).parents[1] / package
        shutil.copytree(source, tmp_path / package, ignore=unwanted)
    for file, changes in edits().items():
        text = (tmp_path / file).read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, (file, before)
            text = text.replace(before, after)
        (tmp_path / file).write_text(text, encoding="utf-8")
    return tmp_path


def test_it_touches_one_file_and_its_use() -> None:
    assert {file: len(changes) for file, changes in edits().items()} == {
        "pipeline/core/options/options.py": 3,
        "pipeline/insight/forecast/describe.py": 1,
    }


def test_it_is_an_option_like_all_others(copy) -> None:
    (code,), (shown,) = blocks(STEPS[2], "python"), blocks(STEPS[2], "text")
    code = f"import sys; sys.path.insert(0, {str(copy)!r})\n{textwrap.dedent(code)}"
    code += f"import pipeline; assert pipeline.__file__.startswith({str(copy)!r})\n"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
