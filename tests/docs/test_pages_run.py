"""The programs of pages that are one program from top to bottom run, and do what they say."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.docs.pages.reading import DOCS
from tests.docs.pages.running import run


@pytest.mark.slow
def test_state_of_losses(tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"):
        found = run(DOCS / "losses.md", tmp_path).names
    pipe, moe = found["pipe"], found["moe"]
    assert all(float(abs(stage.norm.mean[...]).max()) > 0 for stage in pipe.stages())
    for stage in moe.stages():
        assert {round(abs(float(x)), 6) for x in stage.bias[...]} <= {0.0, 0.001}
        assert not stage.counts[...].any()


@pytest.mark.slow
def test_generation(tmp_path: Path) -> None:
    found = run(DOCS / "generation.md", tmp_path).names
    assert found["text"].shape == found["drawn"].shape == (6, 20)
    assert found["scores"].shape == (6, 16)
