"""Contents of a guide: files, commands with their output, and blocks of other languages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import consoles, reading
from tests.docs.pages.consoles import Command

GUIDES = reading.DOCS / "guides"
LIMIT = 900  # seconds that a command may take on a busy machine


def blocks(page: str, language: str, section: str = "") -> list[str]:
    """The blocks of a guide in a language, in order: all, or those of one section (##)."""
    found = (one for one in reading.blocks(GUIDES / page) if one.language == language)
    return [one.code for one in found if section in ("", one.section)]


def commands(page: str) -> list[Command]:
    """All commands of a guide's consoles."""
    found = [one for one in reading.blocks(GUIDES / page) if one.language == "console"]
    return [command for block in found for command in consoles.commands(block)]


def write_files(page: str, folder: Path) -> list[str]:
    """Write the guide's programs; returns their names."""
    files = [one for one in reading.blocks(GUIDES / page) if one.file]
    for one in files:
        (folder / one.file).write_text(one.code, encoding="utf-8")
    return [one.file for one in files]


def run(line: str, folder: Path, **variables: str) -> str:
    """The output of a command, on both streams."""
    return consoles.run(line, folder, LIMIT, **variables)[1]


def missing(command: Command, printed: str) -> str:
    """The first line that is shown and not printed, in its order; "" if there is none."""
    lines = iter(printed.splitlines())
    for shown in command.shown:
        pattern = ".*".join(re.escape(part) for part in shown.split("..."))
        if shown != "..." and not any(re.fullmatch(pattern, line) for line in lines):
            return shown
    return ""
