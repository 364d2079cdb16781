"""The worked examples of CONTRIBUTING.md that edit the packages: applied to a copy, as written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pipeline

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
Edits = dict[str, list[tuple[str, str]]]


def steps(title: str) -> list[str]:
    """The numbered steps of a section."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]


def blocks(step: str, language: str) -> list[str]:
    """The blocks of a step in a language, at the margin."""
    found = re.findall(rf"^   ```{language}\n(.*?)^   ```", step, re.MULTILINE | re.DOTALL)
    return [re.sub(r"^   ", "", block, flags=re.MULTILINE) for block in found]


def edits(title: str) -> Edits:
    """By file, the text that each edit replaces and the new one."""
    found: Edits = {}
    for step in steps(title):
        for block in blocks(step, "diff"):
            lines = block.splitlines()
            before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            (file,) = dict.fromkeys(re.findall(r"`(pipeline/[\w/]+\.py)`", step.split("```")[0]))
            found.setdefault(file, []).append((before, after))
    return found


def copy_with(changes: Edits, folder: Path) -> None:
    """Copy the packages into a folder, with changes."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for package in ("collectives", "pipeline", "schedules"):
        source = Path(pipeline.__file__).parents[1] / package
        shutil.copytree(source, folder / package, ignore=unwanted)
    for file, pairs in changes.items():
        text = (folder / file).read_text(encoding="utf-8")
        for before, after in pairs:
            assert text.count(before) == 1, (file, before)
            text = text.replace(before, after)
        (folder / file).write_text(text, encoding="utf-8")


def in_copy(folder: Path, code: str) -> str:
    """A program that imports the packages from a folder."""
    return (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}\n"
        f"import pipeline; assert pipeline.__file__.startswith({str(folder)!r})\n"
    )
