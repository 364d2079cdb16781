"""CONTRIBUTING.md: its example feature of a stage call, added to a copy as it is written there."""

from __future__ import annotations

import pytest

from tests.support.contributing import blocks, copy_with, edits, in_copy, steps
from tests.support.elsewhere import python

TITLE = "A feature of a stage call in five minutes"


@pytest.mark.slow
def test_it_is_summed_by_every_executor(tmp_path) -> None:
    copy_with(edits(TITLE), tmp_path)
    (code,) = blocks(steps(TITLE)[2], "python")
    done = python("-c", in_copy(tmp_path, code))
    assert done.returncode == 0, done.stderr
