"""bench/compile_time.py: its tables, of seconds that are given."""

from __future__ import annotations

import pytest

import schedules
from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import sys
from bench import compile_time

compile_time.plain_seconds = lambda *_, **__: 2.0
compile_time.gpt_seconds = lambda name, *_, **__: 3.0 if name == "zb_h1" else 5.0
sys.argv = ["compile_time", "microbatches", "families", "depth", "--rounds", "1"]
compile_time.main()
"""


@pytest.mark.slow
def test_every_family_and_depth_stands_beside_the_plain_model() -> None:
    done = python("-c", CODE)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    for name in schedules.names():
        ratio = "1.50" if name == "zb_h1" else "2.50"
        found = [row[-1] for row in rows if row[:1] == [name] and len(row) == 5]
        assert found == [ratio, ratio], name
    assert ["zb_h1", "None", *["1.50"] * 4] in rows
    assert ["eager_1f1b", "stage", *["2.50"] * 4] in rows
