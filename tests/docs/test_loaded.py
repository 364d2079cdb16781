"""The modules that `import pipeline; pipeline.Pipeline` loads, by name: a new one is a decision.

python -m tests.docs.test_loaded    # rewrite loaded.txt, to be read before it is committed
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

NAMES = Path(__file__).with_name("loaded.txt")
MOST = 188  # modules
MOST_LINES = 26_000
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
    return {name: Path(file) for name, file in map(str.split, done.stdout.splitlines())}


@pytest.mark.few
def test_a_pipeline_loads_the_modules_that_are_listed_and_no_others() -> None:
    modules = loaded()
    assert sorted(modules) == NAMES.read_text(encoding="utf-8").split()
    assert len(modules) <= MOST
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in modules.values())
    assert lines <= MOST_LINES


if __name__ == "__main__":
    NAMES.write_text("\n".join(sorted(loaded())) + "\n", encoding="utf-8")
