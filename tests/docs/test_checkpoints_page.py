"""The examples of docs/checkpoints.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.mark.slow
def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # of optax
        for block in blocks:
            exec(block, names)
