"""docs/architecture.md leads where it says, and no page names a file that is not there."""

from __future__ import annotations

import ast
import functools
import re
import sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import pytest

from collectives import make_mesh
from pipeline import Pipeline
from tests.docs.test_rooms import PACKAGES, imports, modules
from tests.support import models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

WORDS = {
    "data",
    "nnx.State",
    "remat=None",
    "shard_map",
    "stage",
}  # of steps, that are no names in a module
MODULES = modules()
FOLDERS = {name for name, file in MODULES.items() if file.name == "__init__.py"}
RIGHT = 35  # where the drawing's second column begins


def test_the_pages_are_found() -> None:
    assert len(PAGES) >= 13


def located(path: str) -> Path:
    """A path as the pages write it, in the checkout or in site-packages."""
    package, _, rest = path.partition("/")
    return (MODULES[package].parent if package in PACKAGES else ROOT / package) / rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "|".join((*PACKAGES, "tests", "bench", "examples", "docs"))
    paths = set(re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*\w/?)", text))
    if page.name == "CONTRIBUTING.md":  # it tells its reader which to write
        told = "split_bfs", "stores/narrow"
        paths = {path for path in paths if not any(name in path for name in told)}
    assert [path for path in sorted(paths) if not located(path).exists()] == []
    links = re.findall(r"\]\(([^)#:\s]+\.\w+)[^):\s]*\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def steps() -> list[tuple[list[str], set[str]]]:
    """Modules of each step, with the names that the page gives of them."""
    _, _, section = PAGE.partition("in ten steps\n")
    found = []
    for step in re.split(r"^\d+\. ", section.partition("\n## ")[0], flags=re.MULTILINE)[1:]:
        quoted = re.findall(r"`([^`]+)`", step.partition("\n\n")[0])
        paths = [one.removesuffix(".py").replace("/", ".") for one in quoted if "/" in one]
        names = {one for one in quoted if "/" not in one and len(one) > 1} - WORDS
        found.append((paths, names))
    return found


def reach(module: Any, name: str) -> Any:
    """The object of a dotted name in a module, or None."""
    return functools.reduce(lambda one, part: getattr(one, part, None), name.split("."), module)


def runs(found: Any, ran: set[tuple[str, str]]) -> bool:
    """True if a function, or any method of a class, was called."""
    found = getattr(found, "func", getattr(found, "__wrapped__", found))  # of what decorates it
    name, file = found.__qualname__, sys.modules[found.__module__].__file__
    if not isinstance(found, type):
        return (file, name) in ran
    return is_dataclass(found) or any(
        one == file and called.startswith(f"{name}.") for one, called in ran
    )


def test_there_are_ten_steps() -> None:
    assert len(steps()) == 10


def test_every_step_is_taken() -> None:
    """Names of the steps are defined where the page says, and a gradient runs all of them."""
    ran = set()

    def note(frame, event, _) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    mesh, x = make_mesh(stage=2), models.rows(4)
    sys.setprofile(note)
    try:
        stages = models.build(models.Block, 2)
        pipe = Pipeline(stages, 2, mesh=mesh, schedule="zb_h1", loss_fn=models.squares)
        jax.eval_shape(pipe.value_and_grad, x, x)
    finally:
        sys.setprofile(None)
    for paths, names in steps():
        places = [import_module(path) for path in paths]
        for name in sorted(names):
            found = [one for place in places if (one := reach(place, name)) is not None]
            assert found, f"{name} is in none of {paths}"
            assert any(runs(one, ran) for one in found), f"{name} of {paths} does not run"


def answers() -> list[tuple[str, str]]:
    """(question, path) of each row of the last table."""
    return re.findall(r"^\| (.*\*\*.*) \| `(.*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("question", "path"), answers(), ids=lambda text: text.split("/")[-1])
def test_a_file_is_found_by_its_path_and_its_first_line(question: str, path: str) -> None:
    said = ast.get_docstring(ast.parse(located(path).read_text(encoding="utf-8")))
    assert said is not None
    seen = f"{path} {said.splitlines()[0]}".lower()
    words = " ".join(re.findall(r"\*\*(.+?)\*\*", question)).lower().split()
    assert [word for word in words if word not in seen] == []


def test_all_questions_are_found() -> None:
    section = PAGE.partition("## Where to go\n")[2].partition("\n## ")[0]
    assert len(answers()) == sum(line.startswith("| ") for line in section.splitlines()) - 1 >= 12


def between(package: str) -> dict[str, set[str]]:
    """Imports between the folders and files of a package, each with all that is below it."""
    files = {name: file for name, file in MODULES.items() if name.startswith(f"{package}.")}
    graph: dict[str, set[str]] = {}
    for name, wanted in imports(files).items():
        child = name.removeprefix(f"{package}.").split(".")[0]
        reached = {one.removeprefix(f"{package}.").split(".")[0] for one in wanted}
        graph.setdefault(child, set()).update(reached - {child})
    return graph


@pytest.mark.parametrize(
    ("drawn", "package", "column"),
    [
        (0, "schedules", 0),
        (0, "pipeline", RIGHT),
        (1, "pipeline.core", 0),
        (1, "pipeline.insight", RIGHT),
    ],
)
def test_rooms_stand_above_those_that_they_import_from(
    drawn: int, package: str, column: int
) -> None:
    drawing = PAGE.split("```\n")[1 + 2 * drawn].splitlines()
    end = [n for n, line in enumerate(drawing) if line.startswith(" collectives:")]
    width = RIGHT if column == 0 else None
    words = [line[column:][:width].split() for line in drawing[: end[0] if end else None]]
    floor = {found[0].removesuffix(".py"): n for n, found in enumerate(words[1:]) if found}
    graph = between(package)
    folders = {name for name in graph if f"{package}.{name}" in FOLDERS}
    assert folders <= set(floor)
    assert [
        f"{name} imports from {one}, which stands above it"
        for name in sorted(set(graph) & set(floor))
        for one in sorted(graph[name] & set(floor) - {name})
        if floor[one] <= floor[name]
    ] == []


def code(file: Path) -> str:
    """The code of a file, without comments and docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            body[0] = ast.Pass()
    return ast.unparse(tree)


def touched() -> list[list[str]]:
    """Rows of the record, with the number of files, by room, whose code names a feature."""
    lines = PAGE.partition("| feature | words |")[2].partition("\n\n")[0].splitlines()
    table = [
        [cell.strip() for cell in row.strip("|").split("|")][:2] for row in lines if "` |" in row
    ]
    codes = {name: code(file) for name, file in MODULES.items()}
    rooms = "pipeline.core.step", "pipeline.core", "schedules", ""
    for row in table:
        words = "|".join(map(re.escape, re.findall(r"`(.+?)`", row[1])))
        names = [n for n, text in codes.items() if re.search(rf"(?<!\w)(?:{words})(?!\w)", text)]
        own = [next(r for r in rooms if not r or f"{n}.".startswith(f"{r}.")) for n in names]
        row += [str(own.count(room)) for room in rooms]
    return table


def test_the_files_that_a_feature_touches_are_counted() -> None:
    for row in touched():
        assert f"| {' | '.join(row)} |" in PAGE
