"""CONTRIBUTING.md: its example option, added to a copy of the package as it is written there."""

from __future__ import annotations

from tests.support.contributing import blocks, copy_with, edits, in_copy, steps
from tests.support.elsewhere import python

TITLE = "An option in five minutes"


def test_it_is_an_option_like_all_others(tmp_path) -> None:
    copy_with(edits(TITLE), tmp_path)
    step = steps(TITLE)[2]
    (code,), (shown,) = blocks(step, "python"), blocks(step, "text")
    done = python("-c", in_copy(tmp_path, code))
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
