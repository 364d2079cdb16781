"""docs/training.md: its Python runs from top to bottom, its TOML is a configuration."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest

from pipeline.training.config import Config
from tests.docs.pages import given, reading

BLOCKS = reading.blocks(reading.DOCS / "training.md")
FINE_TUNING = "Fine-tuning: LoRA, adapters, frozen layers"


def blocks(language: str, *, fine_tuning: bool = False) -> list[str]:
    """The blocks of the page in a language, without that section or only those of it."""
    found = (one for one in BLOCKS if (one.section == FINE_TUNING) == fine_tuning)
    return [one.code for one in found if one.language == language]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_page_runs_as_printed(capsys):
    names: dict[str, Any] = {}
    assert len(blocks("python")) == 9
    for block in blocks("python"):
        exec(compile(block, "docs/training.md", "exec"), names)
    assert len(names["trainer"].losses) == 5
    assert names["shapes"] == [(2, 4), (2, 4), (2, 8)]
    printed = capsys.readouterr().out
    assert "True 32768.0" in printed
    assert np.isfinite(names["trainer"].eval_loss)


@pytest.mark.usefixtures("standard_promotion")
def test_the_section_on_fine_tuning_runs():
    """With the names of a reader's program, whose stages have adapters."""
    names = given.names()
    assert len(blocks("python", fine_tuning=True)) == 2
    for block in blocks("python", fine_tuning=True):
        exec(compile(block, "docs/training.md", "exec"), names)
    assert np.isfinite(names["loss"])


def test_the_keys_of_the_page_are_a_configuration():
    (text,) = blocks("toml")
    config = Config.from_dict(tomllib.loads(text))
    assert config.pipeline.schedule == "1f1b"
    assert config.run.best == "min"


def test_the_main_job_is_a_configuration():
    config = Config.from_files([reading.ROOT / "examples" / "gpt.toml"])
    assert config.parallel is not None
    assert config.parallel.microbatch_size == 1
    assert config.run.steps == 240
