"""The example of long rows: every way of it trains, and all have one loss (issue 41)."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.close import assert_close

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import corpus
import long_gpt


@pytest.mark.slow
def test_all_ways_have_one_loss(monkeypatch, capsys):
    text = np.random.default_rng(0).integers(32, 127, 4096).astype(np.uint8)
    monkeypatch.setattr(corpus, "read", lambda: corpus.Corpus(text, text[:64], 1))
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies its int32 step by floats
        found = {way: long_gpt.train(way, length=64, rows=2, steps=2) for way in long_gpt.WAYS}
    for losses in found.values():
        assert_close(losses, found["slices"])
    assert capsys.readouterr().out.count("temporaries") == 3
