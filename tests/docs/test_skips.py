"""The line that says what was skipped names what is missing and how to have it (issue 38)."""

from __future__ import annotations

import pytest

from tests.support.skips import line


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ([], ""),
        (
            ["Skipped: could not import 'tunix.sft.peft_trainer': No module named 'tunix'"],
            "skipped 1: 1 for want of google-tunix (pip install google-tunix)",
        ),
        (
            [
                "Skipped: no parity with the reference: it wants torch and transformers",
                "Skipped: could not import 'torch': No module named 'torch'",
                "Skipped: selenium is not installed",
                "Skipped: reads /proc",
            ],
            (
                "skipped 4: 2 for want of torch and transformers (pip install torch transformers), "
                "1 for want of a browser (chromium and chromedriver on PATH), 1: reads /proc"
            ),
        ),
    ],
)
def test_one_line_says_what_was_skipped(reasons, said):
    assert line(reasons) == said
