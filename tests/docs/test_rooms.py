"""The rooms of the packages: what imports what, without circles, and how much a folder holds.

Every import counts, lazy ones and those for types too.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = "schedules", "collectives", "pipeline"
MOST = 15  # files of a folder

DEEPEST = 10  # folders on a way of imports


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


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Of every module, the modules of ours that it names."""
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [one if one in files else node.module for one in below]
            graph[name].update(one for one in wanted if one in files and one != name)
    return graph


def rooms(files: dict[str, Path], graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between folders; a module on the top floor is a room of its own."""

    def room(name: str) -> str:
        is_folder = files[name].name == "__init__.py"
        above = name if is_folder else name.rpartition(".")[0]
        return name if above in PACKAGES else above

    found: dict[str, set[str]] = {room(name): set() for name in files}
    for name, wanted in graph.items():
        found[room(name)] |= {room(one) for one in wanted} - {room(name)}
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
    """The package itself is the top one. A module beside the folders is a door, and no floor."""
    files = {name: f for name, f in modules().items() if name.split(".")[0] == package}
    folders = {name for name, file in files.items() if file.name == "__init__.py"}
    found = depths(rooms(files, imports(files)), folders)
    assert {name: floor for name, floor in found.items() if floor > DEEPEST} == {}


def test_a_folder_is_no_corridor() -> None:
    files = modules()
    count: dict[str, int] = {}
    for name, file in files.items():
        folder = name if file.name == "__init__.py" else name.rpartition(".")[0]
        count[folder] = count.get(folder, 0) + 1
    assert not {folder for folder, n in count.items() if n > MOST}


def test_a_room_says_what_lives_there_and_what_never_does() -> None:
    for name, file in modules().items():
        if file.name == "__init__.py" and name.count("."):
            said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            assert said, name
