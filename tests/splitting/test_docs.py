"""docs/split.md: its program runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from tests.support.close import assert_close

PAGE = (Path(__file__).parents[2] / "docs" / "split.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_the_page(capsys) -> None:
    own = [block for block in BLOCKS if not block.startswith("# ")]
    assert (len(BLOCKS), len(own)) == (5, 2)
    names: dict[str, Any] = {"__name__": "split.md"}
    exec(compile("\n".join(own), "docs/split.md", "exec"), names)
    printed = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert printed is not None
    assert capsys.readouterr().out == printed[1]
    pipe, parts, given = names["pipe"], names["parts"], (names["tokens"], names["padding"])
    inputs, extras = parts.inputs(*given)
    wanted = nnx.jit(names["call"])(names["model"], *given)
    assert_close(pipe(inputs, extras=extras), wanted)
