"""Lines of code in each room of the packages: pinned in lines.json, and they only go down.

python -m tests.docs.test_lines    # write today's numbers; it refuses a number that grew

Docstrings are counted for all packages together; blank lines and comments are free.
"""

from __future__ import annotations

import ast
import collections
import functools
import json
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).parents[1]
PINS = Path(__file__).with_name("lines.json")
SLACK = 10  # lines that a room may lose before its pin has to follow
ALL = "all packages"
DOCSTRINGS = "docstrings"
# Longest first: a file belongs to the first room that holds it.
ROOMS = (
    *("pipeline/core/step", "pipeline/core/programs", "pipeline/core/model"),
    *("pipeline/core/autodiff", "pipeline/core/options", "pipeline/core/placement"),
    *("pipeline/layers_view", "pipeline/core", "pipeline/models", "pipeline/training"),
    *("pipeline/cli", "pipeline/processes", "pipeline/insight", "pipeline/lint"),
    *("pipeline/planner", "pipeline/splitting", "pipeline/base", "pipeline", "schedules"),
    "collectives",
)
PUBLIC_NAMES_OF_MODELS = ("layers", "decoders", "weights", "vocabulary")


def room_of(file: Path) -> str:
    """The room of a file, relative to the root."""
    if file.parts[0] == "pipeline" and file.parts[1] in PUBLIC_NAMES_OF_MODELS:
        return "pipeline/models"
    return next(room for room in ROOMS if file.is_relative_to(room))


def count(text: str) -> tuple[int, int]:
    """The lines of code and of docstrings in a file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    code = [n for n, line in lines if line and not line.startswith("#") and n not in docs]
    return len(code), len(docs)


@functools.cache
def counted() -> dict[str, int]:
    """The lines of code by room, and of all docstrings."""
    rooms: collections.Counter[str] = collections.Counter()
    for package in ("pipeline", "schedules", "collectives"):
        for file in sorted((ROOT / package).rglob("*.py")):
            code, docs = count(file.read_text(encoding="utf-8"))
            rooms.update({room_of(file.relative_to(ROOT)): code, ALL: code, DOCSTRINGS: docs})
    return {name: rooms[name] for name in (*ROOMS, ALL, DOCSTRINGS)}


@pytest.mark.parametrize("room", [*ROOMS, ALL, DOCSTRINGS])
def test_a_room_does_not_grow(room: str) -> None:
    lines, pin = counted()[room], json.loads(PINS.read_text(encoding="utf-8"))[room]
    assert lines <= pin, f"{room} has {lines} lines, {lines - pin} more than lines.json"
    assert lines >= pin - SLACK, f"{room} has {lines} lines: run this file"


def test_code_docstrings_and_other_lines_are_told_apart() -> None:
    text = '"""A\n\nmodule."""\n\n# why\nx = """\n\nno docstring"""\n\ndef f():\n    """F."""\n'
    assert count(text) == (3, 4)  # the blank line within a string is no code


if __name__ == "__main__":
    old, new = json.loads(PINS.read_text(encoding="utf-8")), counted()
    grown = {room: lines for room, lines in new.items() if lines > old.get(room, lines)}
    if grown:
        raise SystemExit(f"these grew, and their pins stay: {grown}")
    PINS.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
