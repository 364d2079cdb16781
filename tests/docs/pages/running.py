"""Runs a page from top to bottom, as a reader would, in an empty folder.

* Python runs, block after block in one program; a block that begins with ``# name.py`` is a file.
* Python with ``>>>`` runs as printed, results compared (``...`` with `# doctest: +ELLIPSIS`).
* ``text`` after it was printed before, where ``...`` stands for anything.
* ``console`` has commands behind ``$`` and what they print, on both streams.
* ``toml``, ``json``: can be read. Other languages, and blocks without one, are for the eye.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.pages.consoles import commands
from tests.docs.pages.consoles import run as run_command
from tests.docs.pages.reading import Block, blocks, name_of

READERS: dict[str, Callable[[str], Any]] = {"toml": tomllib.loads, "json": json.loads}


@dataclass
class Run:
    """A page under way: names that its blocks have left, what was printed, the files' folder."""

    page: Path
    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""

    def take(self, block: Block) -> None:
        """Run a block, or see that it is as the page says."""
        where = f"{name_of(self.page)}:{block.line}"
        if block.mark.startswith("not run"):
            if block.language == "python" and ">>> " not in block.code:
                compile(block.code, where, "exec")
            return
        if block.file:
            (self.folder / block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "python" and ">>> " in block.code:
            self._examples(block, where)
        elif block.language == "python":
            out = io.StringIO()
            code = "\n" * (block.line - 1) + block.code  # so that errors name the page's lines
            with contextlib.redirect_stdout(out):
                exec(compile(code, name_of(self.page), "exec"), self.names)
            self.printed += out.getvalue()
        elif block.language == "console":
            self._console(block, where)
        elif block.language == "text":
            assert says(block.code, self.printed), f"{where}: not printed, but\n{self.printed}"
        elif block.language in READERS:
            READERS[block.language](block.code)

    def _examples(self, block: Block, where: str) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.code, self.names, where, str(self.page), block.line - 1
        )
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=said.append, clear_globs=False)
        self.names.update(test.globs)
        assert "".join(said) == "", where

    def _console(self, block: Block, where: str) -> None:
        for command in commands(block):
            code, printed = run_command(command.line, self.folder)
            assert code == 0, f"{where}: {command.line}\n{printed}"
            shown = "\n".join(command.shown)
            assert says(shown, printed), f"{where}: {command.line} printed\n{printed}"


def says(shown: str, printed: str) -> bool:
    """True if the output that a page shows was printed; ``...`` stands for anything."""
    pattern = re.escape(shown.strip()).replace(r"\.\.\.", ".*")
    return re.search(pattern, printed, re.DOTALL) is not None


def run(page: Path, folder: Path, names: dict[str, Any] | None = None) -> Run:
    """Run a page; returns what it has left."""
    found = Run(page, folder, {"__name__": "__main__", **(names or {})})
    for block in blocks(page):
        found.take(block)
    return found
