"""Commands of a page's consoles, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages.reading import ROOT, Block

LIMIT = 300  # seconds that a command may take on a busy machine


@dataclass(frozen=True)
class Command:
    """A line of a console, and the lines that the page shows below it; ``...`` is anything."""

    line: str
    shown: tuple[str, ...]


def commands(block: Block) -> list[Command]:
    """All commands of a console: what stands behind ``$``."""
    found = []
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        found.append(Command(line, tuple(shown)))
    return found


def run(line: str, folder: Path, limit: float = LIMIT, **variables: str) -> tuple[int, str]:
    """A command's exit code, and what it prints on both streams."""
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": where, "PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")
