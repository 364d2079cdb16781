"""docs/weights.md: its blocks run in order, its commands run, its table names all families."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipeline import weights
from pipeline.cli.main import main
from tests.docs.pages.reading import DOCS, blocks
from tests.docs.pages.running import run
from tests.models.weights import tiny

PAGE = (DOCS / "weights.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny.write(
        tmp_path / "checkpoint", tiny.CONFIGS["llama"], tiny.tensors_of(tiny.CONFIGS["llama"])
    )
    monkeypatch.chdir(tmp_path)
    page = DOCS / "weights.md"
    assert [block.language for block in blocks(page)].count("python") == 6
    said = run(page, tmp_path).printed
    layers = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    named, streamed = said.split("NamedSharding", 1)[0].splitlines()[:5], said.splitlines()[5:]
    assert [line.split()[0] for line in named] == layers
    assert list(dict.fromkeys(line.split()[0] for line in streamed)) == layers
    assert (tmp_path / "trained" / "model.safetensors").exists()
    trained, given = tiny.read_all(tmp_path / "trained"), tiny.read_all(tmp_path / "checkpoint")
    assert set(trained) == set(given)
    assert not any((trained[name] == given[name]).all() for name in given)


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    tiny.write(
        tmp_path / "checkpoint", tiny.CONFIGS["llama"], tiny.tensors_of(tiny.CONFIGS["llama"])
    )
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m pipeline (weights .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        arguments = shlex.split(command.replace("--stages 4", "--stages 3"))
        assert main(arguments) == 0
    assert "3 stages, Et|t|tL" in capsys.readouterr().out


def test_the_table_names_all_families():
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert named == ["model_type", *weights.FAMILIES]
