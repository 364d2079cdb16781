"""The rules of the house (docs/architecture.md): what imports what.

1. No circle of imports among modules or folders; a file at the root of a package belongs to it.
2. Rooms outside import names of `pipeline.core` from `pipeline.facade`, but for listed modules.
3. No name of a class stands twice within a package.
4. `pipeline.core` imports neither `pipeline.insight`, `pipeline.lint` nor a public room.

Every import counts, lazy ones and those for types too.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline import core

PACKAGES = "schedules", "collectives", "pipeline"
GROUND = "pipeline.base", "pipeline.core"  # of pipeline, all that core imports
# Public names that may stand twice. Layers of `pipeline.vocabulary` extend those of
# `pipeline.layers`; parts of a model are those of `split` or of a decoder; and a run's file and its
# batches have the words of the engine's `Model` and `Batch`.
TWICE = {"VocabularyEmbedding", "VocabularyHead", "Parts", "Model", "Batch"}

DEEPEST = 13  # folders on a way of imports


def modules() -> dict[str, Path]:
    """All modules by dotted name, in the checkout or in site-packages."""
    found = {}
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in root.rglob("*.py"):
            parts = file.relative_to(root.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imported(file: Path) -> list[tuple[str, str]]:
    """The imports of a file: of each the module, and the dotted name of what is imported."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """The modules of ours that each module names."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        wanted = [one if one in files else module for module, one in imported(file)]
        graph[name].update(one for one in wanted if one in files and one != name)
    return graph


def folder_of(name: str, file: Path) -> str:
    """The folder of a module; a `__main__`, which nothing imports, is apart."""
    is_whole = file.name in ("__init__.py", "__main__.py")
    return name if is_whole else name.rpartition(".")[0]


def rooms(files: dict[str, Path], graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Imports between folders."""
    room = {name: folder_of(name, file) for name, file in files.items()}
    found: dict[str, set[str]] = {one: set() for one in room.values()}
    for name, wanted in graph.items():
        found[room[name]] |= {room[one] for one in wanted if one in room} - {room[name]}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports, its first name again at its end; empty if there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for wanted in sorted(graph[name]):
            if found := search(wanted, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def depths(graph: dict[str, set[str]], counted: set[str]) -> dict[str, int]:
    """The most of what is counted that lies on one way of imports, by where the way begins."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            found[name] = (name in counted) + max(map(depth, graph[name]), default=0)
        return found[name]

    return {name: depth(name) for name in graph}


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}
    assert circle(graph) == ["b", "c", "b"]
    assert circle(graph | {"c": {"d"}}) == []


def test_the_longest_way_is_found() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert depths(graph, {"a", "b", "d"}) == {"a": 3, "b": 2, "c": 1, "d": 1}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert " -> ".join(circle(imports(modules()))) == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_rooms_import_each_other_in_a_circle(package: str) -> None:
    files = {name: f for name, f in modules().items() if name.split(".")[0] == package}
    assert " -> ".join(circle(rooms(files, imports(files)))) == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_stand_on_few_floors(package: str) -> None:
    """The package itself is the top one."""
    files = {name: f for name, f in modules().items() if name.split(".")[0] == package}
    folders = {name for name, file in files.items() if file.name == "__init__.py"}
    found = depths(rooms(files, imports(files)), folders)
    assert {name: floor for name, floor in found.items() if floor > DEEPEST} == {}


def test_a_root_file_belongs_to_its_folder() -> None:
    """A folder below that imports a file of its root closes a circle."""
    files = {name: Path(f"{name.replace('.', '/')}.py") for name in ("a.b.x", "a.y")}
    files |= {name: Path(name.replace(".", "/")) / "__init__.py" for name in ("a", "a.b")}
    graph = {"a": set(), "a.b": set(), "a.b.x": {"a.y"}, "a.y": set()}
    assert circle(rooms(files, graph)) == []
    assert circle(rooms(files, graph | {"a": {"a.b.x"}})) == ["a", "a.b", "a"]


def test_rooms_import_core_through_doors_that_are_listed() -> None:
    """The table is exact: a module that is imported no more has to leave it."""
    found: dict[str, set[str]] = {}
    for name, wanted in imports(modules()).items():
        room = next((room for room in core.DOORS if f"{name}.".startswith(f"{room}.")), name)
        if room not in core.FRONT and not f"{name}.".startswith("pipeline.core."):
            for one in wanted:
                if one.startswith("pipeline.core."):
                    found.setdefault(room, set()).add(one.removeprefix("pipeline.core."))
    assert found == {room: set(names.split()) for room, names in core.DOORS.items()}


def test_core_imports_neither_insight_nor_a_public_room() -> None:
    files = modules()
    found = {
        f"{name} imports {one}"
        for name, wanted in imports(files).items()
        for one in wanted
        if f"{name}.".startswith("pipeline.core.") and one.split(".")[0] == "pipeline"
        if not f"{one}.".startswith(tuple(f"{room}." for room in GROUND))
    }
    assert found == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_has_the_name_of_another(package: str) -> None:
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        if name.split(".")[0] == package:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(name)
    assert {
        name: homes for name, homes in found.items() if len(homes) > 1 and name not in TWICE
    } == {}


def test_a_room_says_what_lives_there_and_what_never_does() -> None:
    for name, file in modules().items():
        if file.name == "__init__.py" and name.count("."):
            said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            assert said, name
