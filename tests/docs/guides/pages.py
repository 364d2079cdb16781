"""What a guide holds: files, commands with what they print, and blocks of other languages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "docs" / "guides"
LIMIT = 900  # seconds that a command may take on a busy machine


@dataclass(frozen=True)
class Command:
    """A line of a console, and the lines that the page shows below it; ``...`` is anything."""

    line: str
    shown: tuple[str, ...]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language, in order."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[Command]:
    """All commands of a page's consoles."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            found.append(Command(line, tuple(shown)))
    return found


def write_files(page: str, folder: Path) -> list[str]:
    """Write the page's programs, blocks that begin with a comment of their name."""
    names = []
    for block in blocks(page, "python"):
        if found := re.match(r"# (\w+\.py)\n", block):
            (folder / found[1]).write_text(block, encoding="utf-8")
            names.append(found[1])
    return names


def run(line: str, folder: Path, **variables: str) -> str:
    """What a command prints, on both streams."""
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": where, "PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def missing(command: Command, printed: str) -> str:
    """The first line that is shown and not printed, in its order; "" if there is none."""
    lines = iter(printed.splitlines())
    for shown in command.shown:
        pattern = ".*".join(re.escape(part) for part in shown.split("..."))
        if shown != "..." and not any(re.fullmatch(pattern, line) for line in lines):
            return shown
    return ""
