"""docs/training.md: its Python runs from top to bottom, its TOML is a configuration."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.training.config import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_page_runs_as_printed(capsys):
    names: dict[str, Any] = {}
    assert len(blocks("python")) == 7
    for block in blocks("python"):
        exec(compile(block, "docs/training.md", "exec"), names)
    assert len(names["trainer"].losses) == 5
    assert names["shapes"] == [(2, 4), (2, 4), (2, 8)]
    printed = capsys.readouterr().out
    assert "True 32768.0" in printed
    assert np.isfinite(names["trainer"].eval_loss)


def test_the_keys_of_the_page_are_a_configuration():
    (text,) = blocks("toml")
    config = Config.from_dict(tomllib.loads(text))
    assert config.pipeline.schedule == "1f1b"
    assert config.run.best == "min"


def test_the_main_job_is_a_configuration():
    config = Config.from_files([ROOT / "examples" / "gpt.toml"])
    assert config.parallel is not None
    assert config.parallel.microbatch_size == 1
    assert config.run.steps == 240
