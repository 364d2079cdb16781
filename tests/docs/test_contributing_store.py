"""CONTRIBUTING.md: its example store and option, added to a copy as they are written there."""

from __future__ import annotations

import pytest

from tests.support.contributing import blocks, copy_with, edits, in_copy, steps
from tests.support.elsewhere import python

TITLE = "A store and its option in ten minutes"


@pytest.mark.slow
def test_a_store_of_narrow_stashes_is_an_option_and_a_file(tmp_path) -> None:
    copy_with(edits(TITLE), tmp_path)
    _, store, _, use, _ = steps(TITLE)
    (code,) = blocks(store, "python")
    (tmp_path / "pipeline/core/step/stores/narrow.py").write_text(code, encoding="utf-8")
    (code,), (shown,) = blocks(use, "python"), blocks(use, "text")
    done = python("-c", in_copy(tmp_path, code))
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
