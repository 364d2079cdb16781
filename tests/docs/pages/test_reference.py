"""The reference has every public name; what pages make of our packages can be made."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline import Pipeline
from tests.docs.pages.reading import DOCS, ROOT, blocks, name_of, pages

REFERENCE = sorted((DOCS / "reference").glob("*.md"))


@pytest.fixture(scope="module")
def contents() -> ModuleType:
    """The part of the site's extension that needs no Sphinx."""
    spec = importlib.util.spec_from_file_location("contents", DOCS / "_ext" / "contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts() -> list[str]:
    return [page.read_text(encoding="utf-8") for page in REFERENCE]


def test_every_public_name_has_one_entry(contents: ModuleType) -> None:
    """Add a missing name to the page of docs/reference/ that has its group."""
    assert contents.missing(texts()) == []
    found = [name for text in texts() for name in contents.entries(text)]
    assert len(found) == len(set(found)) >= 120


def test_a_missing_name_is_found(contents: ModuleType) -> None:
    without = [text.replace("\nlocal_rows\n", "\n") for text in texts()]
    assert contents.missing(without) == ["pipeline.local_rows"]


def test_every_entry_is_there_and_says_what_it_is(contents: ModuleType) -> None:
    for text in texts():
        for name in contents.entries(text):
            lines = contents.entry(name)
            assert lines[0].endswith(f":: {name}")
            module, _, last = name.rpartition(".")
            found = getattr(importlib.import_module(module), last)
            assert found.__doc__ or not contents.is_described(found), f"{name} has no docstring"


def test_what_pages_import_is_in_the_reference(contents: ModuleType) -> None:
    """A name that readers are told to import is public."""
    known = {name for text in texts() for name in contents.entries(text)}
    known |= {name.rpartition(".")[2] for name in known} | set(contents.PUBLIC)
    told = set()
    for page in pages():
        if page.name == "CONTRIBUTING.md":  # a family imports what is within
            continue
        for block in blocks(page):
            if block.language != "python":
                continue
            lines = re.sub(r"^(>>> |\.\.\. )", "", block.code, flags=re.MULTILINE)
            for line in lines.splitlines():
                if not re.match(
                    r"from (pipeline|schedules|collectives)[.\w]* import [\w, ]+$", line
                ):
                    continue
                (node,) = ast.parse(line).body
                for alias in node.names:
                    named = f"{node.module}.{alias.name}"
                    if alias.name not in known and named not in known:
                        told.add(f"{name_of(page)}: {named}")
    assert sorted(told) == []


# --- the directives, without Sphinx ---


def test_a_timetable(contents: ModuleType, tmp_path: Path) -> None:
    name, text = contents.draw("1f1b -S 2 -M 2", tmp_path)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "rank 1" in text
    assert contents.draw("1f1b -S 2 -M 2", tmp_path) == (name, text)
    assert contents.draw("1f1b -S 2 -M 3", tmp_path)[0] != name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("1f1b -S 0 -M 2", "argument -S/--ranks: "),
        ("2f2b -S 2 -M 2", "2f2b"),
        (
            "1f1b -S 2 -M 2 -o a.html",
            "'1f1b -S 2 -M 2 -o a.html' names an output file; leave it out",
        ),
        ("--help", "draw --help"),
        ("1f1b 'x", "1f1b 'x: No closing quotation"),
    ],
)
def test_a_timetable_that_cannot_be(
    contents: ModuleType, tmp_path: Path, arguments: str, told: str
) -> None:
    with pytest.raises(contents.PageError) as error:
        contents.draw(arguments, tmp_path)
    assert told in str(error.value)


def test_help_is_that_of_the_parser(contents: ModuleType) -> None:
    assert "-o FILE, --output FILE" in contents.help_of(["schedules", "draw"])
    assert contents.help_of(["pipeline", "plan"]).startswith("usage: python -m pipeline plan")
    with pytest.raises(contents.PageError) as error:
        contents.help_of(["collectives"])
    assert str(error.value) == (
        "'collectives' has no command line; those that have are pipeline, schedules"
    )
    with pytest.raises(contents.PageError) as error:
        contents.help_of(["schedules", "paint"])
    assert "python -m schedules paint --help: " in str(error.value)
    assert "invalid choice: 'paint'" in str(error.value)


def test_every_command_has_its_help_on_a_page(contents: ModuleType) -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\{command\} (\w+) ?(\w*)$", page, re.MULTILINE)
    for package in contents.HELP:
        usage = contents.help_of([package])
        (listed,) = re.findall(r"^commands:\n  COMMAND\n((?:    .*\n?)+)", usage, re.MULTILINE)
        commands = re.findall(r"^    (\w+)", listed, re.MULTILINE)
        assert [(package, "")] + [(package, name) for name in commands] == [
            one for one in shown if one[0] == package
        ]


def test_links_out_of_the_folder(contents: ModuleType) -> None:
    text = (
        "[a](docs/limits.md#x) [b](CONTRIBUTING.md) ![c](docs/timeline.png) [d](https://e.org/f.md)"
    )
    assert contents.relinked(text, ROOT / "README.md") == (
        "[a](/limits.md#x) [b](/contributing.md) ![c](/timeline.png) [d](https://e.org/f.md)"
    )
    text = "[a](../CONTRIBUTING.md#x) [b](../limits.md)"
    assert contents.relinked(text, DOCS / "guides" / "a.md") == (
        "[a](../CONTRIBUTING.md#x) [b](../limits.md)"
    )
    assert contents.relinked(text, DOCS / "a.md") == "[a](/contributing.md#x) [b](../limits.md)"


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("M * D parts", r"M \* D parts"),
        ("under (*path), **options", r"under (\*path), \*\*options"),
        ("the *layer view* of `a*b` and ``c * d``", "the *layer view* of `a*b` and ``c * d``"),
        ("* one\n* other", "* one\n* other"),
        (":param num_ranks: S.", r":param num_ranks: S\."),
        ("M.", r"M\."),
        ("A batch of M.", "A batch of M."),
    ],
)
def test_docstrings_are_read_as_they_are_meant(contents: ModuleType, said: str, read: str) -> None:
    assert contents.starred(said) == read


def test_a_name_that_there_is_not(contents: ModuleType) -> None:
    with pytest.raises(contents.PageError) as error:
        contents.expanded("```{api} schedules\nbuild\nbuilt\n```\n")
    assert str(error.value) == "{api}: schedules has no built; take it out of the page"
    assert sys.modules.get("sphinx") is None or "sphinx" not in vars(contents)


def test_the_options_of_a_pipeline_are_listed_by_theme_in_their_order() -> None:
    """Put a missing option beside those of its theme in `Options`, and into the table."""
    text = (DOCS / "reference" / "pipeline.md").read_text(encoding="utf-8")
    table = text.partition("by theme\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (`.*?`) \|", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(rows) == 7
    model = ["stages", "embed", "head", "loss_fn"]
    taken = list(inspect.signature(Pipeline).parameters)
    assert listed == model + [name for name in taken if name not in model]
