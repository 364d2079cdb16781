"""docs/trainers.md: what is printed runs, where the trainer is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.usefixtures("lenient")


def run(*blocks: str, **names: Any) -> dict[str, Any]:
    for block in blocks:
        exec(compile(block, "docs/trainers.md", "exec"), names)
    return names


def of(package: str) -> list[str]:
    """The lines that all examples need, and those of one trainer."""
    return [BLOCKS[0], *(block for block in BLOCKS if block.startswith(f"# {package}\n"))]


def test_the_loop_of_flax():
    assert len(BLOCKS) == 4
    names = run(*BLOCKS[:2])
    assert 0 < float(names["metrics"].compute()["loss"]) < 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tunix():
    pytest.importorskip("tunix.sft.peft_trainer", exc_type=ImportError)
    names = run(*of("tunix"))
    assert names["trainer"].train_steps == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_artifex(tmp_path):
    pytest.importorskip("artifex.generative_models.training", exc_type=ImportError)
    names = run(*of("artifex"), folder=str(tmp_path))
    assert names["metrics"].keys() == {"accuracy", "loss", "step"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_10.pkl"]
