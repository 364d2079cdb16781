"""docs/weights.md: its blocks run in order, its commands run, its table names all families."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jax
import pytest

from pipeline import weights
from pipeline.cli.main import main
from tests.weights import tiny

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    tiny.write(
        tmp_path / "checkpoint", tiny.CONFIGS["llama"], tiny.tensors_of(tiny.CONFIGS["llama"])
    )
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with jax.numpy_dtype_promotion("standard"):  # of optax
        exec("\n".join(blocks), {})
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]
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
    assert len(commands) == 3
    for command in commands:
        arguments = shlex.split(command.replace("--stages 4", "--stages 3"))
        assert main(arguments) == 0
    assert "3 stages, Et|t|tL" in capsys.readouterr().out
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_the_table_names_all_families():
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert named == ["model_type", *weights.FAMILIES]
