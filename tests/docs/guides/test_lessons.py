"""Guides that are one program, what they leave; the tutorial; and the drawings of the concepts.

quickstart.md, precision.md, checkpoints.md, memory.md, tutorial.ipynb; others run as any page does.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jax
import numpy as np
import pytest

from pipeline.cli.main import main as pipeline_main
from schedules.tools.main import main as schedules_main
from tests.docs.pages.reading import DOCS, blocks
from tests.docs.pages.running import run, says

GUIDES = DOCS / "guides"
COMMANDS = {"pipeline": pipeline_main, "schedules": schedules_main}
LARGEST = 8000  # bytes of a drawing


def texts(page: str, language: str) -> list[str]:
    """The blocks of a guide in a language."""
    return [block.code for block in blocks(GUIDES / page) if block.language == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow(page: Path, folder: Path) -> dict[str, Any]:
    """Names that a page's blocks leave, after a check of the output that it shows."""
    with jax.numpy_dtype_promotion("standard"):  # of optax
        return run(page, folder).names


@pytest.mark.slow
def test_quick_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On four devices, each file with its own names, and what it says of them (issue 52)."""
    first, make, *mine = texts("quickstart.md", "python")
    files = {"first.py": first, "make.py": make, "mine.py": "\n".join(mine)}
    page = (GUIDES / "quickstart.md").read_text(encoding="utf-8")
    assert sorted(files, key=page.index) == list(files)
    for name, code in files.items():
        (folder / name).write_text(code, encoding="utf-8")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"  # the last wins
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; [*map(runpy.run_path, {[*files]})]"],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in texts("quickstart.md", "text"):
        assert says(shown, done.stdout), (shown, done.stdout)
    assert "b'A pipeline is -> cut into " in done.stdout
    trained, reloaded = re.search(r"then (\S+), reloaded (\S+)$", done.stdout).groups()
    assert trained == reloaded
    assert float(trained) < 0.5
    commands = re.findall(
        r"^python -m (pipeline|schedules) (.*)", "\n".join(texts("quickstart.md", "")), re.MULTILINE
    )
    assert [COMMANDS[name](shlex.split(arguments)) for name, arguments in commands] == [0, 0]
    assert "stage 3: layer" in capsys.readouterr().out
    left = {path.name for path in folder.iterdir()}
    assert left - {*files} == {"checkpoint", "tuned", "step.html"}


@pytest.mark.slow
def test_precision(folder: Path) -> None:
    found = follow(GUIDES / "precision.md", folder)
    assert found["finite"]
    assert set(found["found"]) == {"gpipe", "1f1b", "eager_1f1b", "zb_h1"}


@pytest.mark.slow
def test_memory() -> None:
    """Its examples run as printed; its table is of one jax, and near what any predicts."""
    text = (GUIDES / "memory.md").read_text(encoding="utf-8")
    examples = doctest.DocTestParser().get_doctest(text, {}, "memory.md", "memory.md", 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        runner.run(examples, out=said.append, clear_globs=False)
    assert "".join(said) == ""
    assert len(examples.examples) >= 25
    found = examples.globs["found"]
    rows = re.findall(r"^(\S.*?) +([\d.]+) GiB$", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(found)
    for name, size in rows:
        assert float(size) == pytest.approx(found[name], rel=0.15), name


@pytest.mark.slow
def test_checkpoints(folder: Path) -> None:
    found = follow(DOCS / "checkpoints.md", folder)
    assert sorted(found["before"]) == [0, 1, 2]
    assert sorted(found["after"]) == [3, 4, 5]
    assert sorted(found["rest"]) == [6, 7]
    assert found["taken"] == 4
    losses = [float(found[name].loss(*found["batch"])) for name in ("pipe", "back")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.slow
def test_tutorial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells are run here, and not by a kernel of Jupyter's and the twenty packages it needs."""
    import matplotlib as mpl

    mpl.use("Agg")
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)
    found = follow(DOCS / "tutorial.ipynb", folder)
    assert found["losses"][-1] < 0.5
    assert found["step"] == len(found["losses"]) == 100
    batch = found["inputs"], found["targets"]
    assert abs(float(found["narrow"].loss(*batch)) - float(found["pipe"].loss(*batch))) < 1e-4
    for prompt, written in zip(found["prompts"], found["written"], strict=True):
        assert bytes(np.concatenate([prompt, written[:20]]).astype(np.uint8)) in found["text"]


def test_the_tutorial_has_no_outputs() -> None:
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda p: p.name)
def test_a_drawing_is_small_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < LARGEST
    root = ET.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{svg}title").text
    assert len(root.find(f"{svg}desc").text) > 20
    assert root.findall(f"{svg}text")  # as text, to be read and searched
    assert "prefers-color-scheme:dark" in text


def test_every_drawing_is_on_a_page() -> None:
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(drawings/(\w+\.svg)\)", page)) == sorted(
        path.name for path in (DOCS / "drawings").iterdir()
    )
