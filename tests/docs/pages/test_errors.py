"""docs/errors.md: every message on it is one that the code raises."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from tests.docs.pages.reading import DOCS

PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")


def messages(page: str) -> list[str]:
    """First cells of the tables, without those of JAX's own errors."""
    ours = page.partition("\n## Errors of JAX")[0]
    return re.findall(r"^\| `(.+?)` \|", ours, re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """A string as the source has it, with … for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "…"


def raised() -> list[str]:
    """All strings of the packages."""
    found = []
    for package in ("pipeline", "schedules", "collectives"):
        for file in Path(find_spec(package).origin).parent.rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            found += [
                text_of(one) for one in nodes if isinstance(one, ast.JoinedStr | ast.Constant)
            ]
    return found


def within(message: str, text: str) -> bool:
    """True if the parts between … follow each other in one string."""
    at = 0
    for part in map(str.strip, message.split("…")):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def unknown(page: str, strings: list[str]) -> list[str]:
    return [one for one in messages(page) if not any(within(one, text) for text in strings)]


def test_every_message_is_raised():
    assert unknown(PAGE, raised()) == []
    assert len(messages(PAGE)) >= 25


def test_a_message_that_nobody_raises_is_found():
    page = "| `is a scalar; every … the batch` | x |\n| `is a vector; … the batch` | x |"
    assert unknown(page, ["… is a scalar; every leaf has the batch"]) == [
        "is a vector; … the batch"
    ]
