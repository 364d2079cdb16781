"""`bench.tpu_long`: its predictions, and the bytes it reads out of a program (issue 41)."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
import math
from pathlib import Path
from bench import tpu_long

PAGE = Path("docs/tpu.md").read_text(encoding="utf-8")
TEXT = '''
  %all-to-all.1 = bf16[1,131072,4,128]{3,2,1,0} all-to-all(%q), channel_id=1
  %all-to-all-start.2 = (bf16[8,64]{1,0}, bf16[8,64]{1,0}) all-to-all-start(%k), channel_id=2
  %all-to-all-done.2 = bf16[8,64]{1,0} all-to-all-done(%all-to-all-start.2)
'''
assert tpu_long.exchanged(TEXT) == 2 * (131072 * 4 * 128 + 8 * 64)
# Queries, results, keys and values, forward and back, but for a rank's own eighth.
forward, backward, sent = tpu_long.predicted_block("context")
assert math.isclose(sent, 2 * 7 / 8 * 2 * (32 + 8) * (131072 / 8) * 128 * 2)
assert 0 < forward < backward
for name, at in tpu_long.CASES.items():
    assert at.data * at.microbatches * at.rows == tpu_long.ROWS
    assert at.data * at.stage * at.cut.ranks == 64
    if name == "slices-equal":
        continue
    one = tpu_long.planned(name, 32)
    assert one.hbm < tpu_long.CHIP.hbm
    rows = [line for line in PAGE.splitlines() if f"(`{name}`)" in line]
    (row,) = (line for line in rows if "| stage again |" in line or "| kept |" in line)
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[4] == f"{one.step:.1f}", (name, one.step)
    assert cells[7] == f"{one.hbm / 1e9:.1f}", (name, one.hbm)
print("fine")
"""


@pytest.mark.slow
def test_cases_and_bytes_of_a_program() -> None:
    done = python("-c", CODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
