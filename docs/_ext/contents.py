"""Contents of the site from our own packages, without Sphinx: drawings, help, entries, links."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_origin
from unittest import mock

ROOT = Path(__file__).parents[2]


class PageError(Exception):
    """An error for a directive that cannot be carried out: the value given, and the rule."""


# --- timetables ---

# Options by which a timetable says where it goes; here the page does.
OURS = re.compile(r"-o|--out")


def draw(arguments: str, folder: Path) -> tuple[str, str]:
    """Write a timetable's page; returns (its name, the drawing in characters).

    Raises:
      PageError: arguments that `python -m schedules draw` refuses, with what it says.
    """
    try:
        given = shlex.split(arguments)
    except ValueError as error:  # a quotation without an end
        raise PageError(f"{arguments}: {error}") from error
    if any(OURS.match(word) for word in given):
        raise PageError(f"{arguments!r} names an output file; leave it out, the page is the output")
    name = hashlib.sha256(arguments.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    page, text = folder / f"{name}.html", folder / f"{name}.txt"
    command(["draw", *given, "-o", str(page), "-o", str(text)])
    return page.name, text.read_text(encoding="utf-8").rstrip()


def command(arguments: list[str]) -> None:
    """Run `python -m schedules` here, quietly."""
    from schedules.tools.main import main

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(arguments)
    except SystemExit as end:  # --help
        raise PageError(f"{shlex.join(arguments)} draws nothing: it ends with {end.code}") from end
    if code:
        raise PageError(errors.getvalue().strip().removeprefix("python -m schedules: "))


# --- commands ---

COLUMNS = 92  # of a help text: what a page has room for
HELP = {"pipeline": "pipeline.cli.main", "schedules": "schedules.tools.main"}


def help_of(words: list[str]) -> str:
    """The output of ``python -m PACKAGE COMMAND --help``.

    Raises:
      PageError: a package or a command that there is not.
    """
    package, *rest = words
    if package not in HELP:
        raise PageError(f"{package!r} has no command line; those that have are {', '.join(HELP)}")
    printed, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = importlib.import_module(HELP[package]).main([*rest, "--help"])
        except SystemExit as end:
            code = end.code
    if code:
        raise PageError(f"python -m {' '.join(words)} --help: {errors.getvalue().strip()}")
    return printed.getvalue().rstrip()


# --- links ---

# Pages that live beside docs/, and where the site has them.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def relinked(text: str, page: Path) -> str:
    """A page's text whose links lead to pages of the site, wherever its file lies."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        there = Path(os.path.normpath(page.parent / path))
        if there.parent == ROOT and there.name in OUTSIDE:
            return f"](/{OUTSIDE[there.name]}{anchor})"
        if page.parent == ROOT and there.is_relative_to(ROOT / "docs"):
            return f"](/{there.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return match[0]

    return re.sub(r"\]\(([^)#:\s]+\.\w+)(#[^)\s]*)?\)", link, text)


# --- search ---

SEARCH = re.compile(r"^<!-- search: (.*?)\s-->$", re.MULTILINE | re.DOTALL)


def key_words(text: str) -> list[str]:
    """The key words of a page: its comment ``<!-- search: freeze, LoRA -->``."""
    return [" ".join(word.split()) for line in SEARCH.findall(text) for word in line.split(",")]


def indexed(text: str) -> str:
    """A page's text whose key words are entries of the search's index, not shown on the page."""

    def entries(match: re.Match[str]) -> str:
        words = (f"! {word}" for word in key_words(match[0]))  # main entries, which come first
        return f"```{{index}} {', '.join(words)}\n```"

    return SEARCH.sub(entries, text)


# --- the reference ---

# Those whose `__all__` the reference has to have; of other modules it has what a page names.
PUBLIC = (
    "pipeline",
    "pipeline.layers",
    "pipeline.decoders",
    "pipeline.weights",
    "schedules",
    "collectives",
)
ENTRIES = re.compile(r"^```\{api\} (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def entries(text: str) -> list[str]:
    """The full names that a page of the reference has entries of."""
    return [
        f"{package}.{name}" for package, names in ENTRIES.findall(text) for name in names.split()
    ]


def missing(pages: Iterable[str]) -> list[str]:
    """Public names that no page has an entry of."""
    found = {name for page in pages for name in entries(page)}
    public = (f"{one}.{name}" for one in PUBLIC for name in importlib.import_module(one).__all__)
    return [name for name in public if name not in found]


def expanded(text: str) -> str:
    """A page's text with its `{api}` blocks as autodoc has them."""

    def block(match: re.Match[str]) -> str:
        names = [f"{match[1]}.{name}" for name in match[2].split()]
        lines = []
        if len(names) > 1:
            lines = [".. autosummary::", "   :nosignatures:", ""]
            lines += [f"   ~{name}" for name in names if is_described(named(name))]
        for name in names:
            lines += ["", *entry(name)]
        return "\n".join(["```{eval-rst}", *lines, "```"])

    return ENTRIES.sub(block, text)


def named(name: str) -> Any:
    """The object of a full name.

    Raises:
      PageError: a module has no such name.
    """
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError) as error:
        raise PageError(f"{{api}}: {module} has no {last}; take it out of the page") from error


def is_described(found: Any) -> bool:
    """True for a class or a function: other objects have no docstring of their own."""
    return callable(found) and get_origin(found) is None


def starred(text: str) -> str:
    """A docstring in which ``M * D`` and ``*names`` start no emphasis, and ``S.`` no list."""
    text = re.sub(
        r"^(\s*(?::[^:\n]+:)? *)([A-Za-z])\.(?=\s|$)", r"\1\2\\.", text, flags=re.MULTILINE
    )
    parts = re.split(r"(`+[^`]+`+)", text)
    kept = r"(?<![\\\w*])\*\w(?:[^*\n]*\w)?\*(?![\w*])"  # *emphasis*
    for n in range(0, len(parts), 2):
        pieces = re.split(f"({kept})", parts[n])
        pieces[::2] = [re.sub(r"(?<!\\)\*(?! )|(?<=\S )\*", r"\\*", piece) for piece in pieces[::2]]
        parts[n] = "".join(pieces)
    return "".join(parts)


def entry(name: str) -> list[str]:
    """Options for autodoc.

    Raises:
      PageError: a module has no such name.
    """
    found = named(name)
    if isinstance(found, dict):
        return [f".. data:: {name}", "", f"   {', '.join(f'``{key}``' for key in found)}."]
    if not is_described(found):
        return [f".. data:: {name}", f"   :value: {found!r}"]
    if not inspect.isclass(found):
        return [f".. autofunction:: {name}"]
    own = [one for one in ("__call__",) if getattr(vars(found).get(one), "__doc__", None)]
    kind = "exception" if issubclass(found, Exception) else "class"
    special = [f"   :special-members: {', '.join(own)}"] if own else []
    return [f".. auto{kind}:: {name}", "   :members:", *special]
