"""The programs of pages that are one program from top to bottom run, and do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def program(page: str) -> dict[str, Any]:
    """What a page's blocks of Python leave, run one after the other."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    found: dict[str, Any] = {"__name__": page}
    exec(compile("\n".join(blocks), page, "exec"), found)
    return found


@pytest.mark.slow
def test_state() -> None:
    found = program("state.md")
    pipe, moe = found["pipe"], found["moe"]
    assert all(float(abs(stage.norm.mean[...]).max()) > 0 for stage in pipe.stages())
    for stage in moe.stages():
        assert {round(abs(float(x)), 6) for x in stage.bias[...]} <= {0.0, 0.001}
        assert not stage.counts[...].any()


@pytest.mark.slow
def test_generation() -> None:
    found = program("generation.md")
    assert found["text"].shape == found["drawn"].shape == (6, 20)
    assert found["scores"].shape == (6, 16)
