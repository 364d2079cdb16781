"""The modules that `import pipeline; pipeline.Pipeline` loads, by name: a new one is a decision.

python -m tests.docs.test_loaded    # rewrite loaded.txt, to be read before it is committed
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pipeline
from tests.docs.test_rooms import depths, imports

NAMES = Path(__file__).with_name("loaded.txt")
MOST = 171  # modules
MOST_LINES = 23_700
LONGEST = 27  # modules on a way of imports among these
CODE = """
import sys, pipeline; pipeline.Pipeline
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("pipeline", "schedules", "collectives"):
        print(name, module.__file__)
"""


def loaded() -> dict[str, Path]:
    """The modules of a fresh process, and their files."""
    root = Path(pipeline.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=True
    )
    pairs = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    return {name: Path(file) for name, file in pairs}


@pytest.mark.few
def test_a_pipeline_loads_the_modules_that_are_listed_and_no_others() -> None:
    modules = loaded()
    assert sorted(modules) == NAMES.read_text(encoding="utf-8").split()
    assert len(modules) <= MOST
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in modules.values())
    assert lines <= MOST_LINES
    graph = {name: wanted & set(modules) for name, wanted in imports(modules).items()}
    assert max(depths(graph, set(graph)).values()) <= LONGEST


@pytest.mark.parametrize(
    "package",
    [
        *("pipeline", "pipeline.layers", "pipeline.layers.experts", "pipeline.decoders"),
        *("pipeline.weights", "pipeline.vocabulary", "pipeline.planner", "pipeline.processes"),
        *("schedules", "collectives"),
    ],
)
def test_names_that_come_when_they_are_used_are_listed_by_dir(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_rooms_are_attributes_in_a_fresh_process() -> None:
    code = "import pipeline, collectives, schedules; print(pipeline.layers.experts.Router, "
    code += "pipeline.planner.CHIPS, collectives.tensor.column_input, schedules.search.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    NAMES.write_text("\n".join(sorted(loaded())) + "\n", encoding="utf-8")
