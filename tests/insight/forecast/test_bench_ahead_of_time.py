"""bench/ahead_of_time.py: the TPU compiler's bytes of a small Llama beside the predicted ones."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python


@pytest.mark.slow
def test_compiled_bytes_of_a_small_llama_are_near_the_predicted_ones() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")
    done = python("-m", "bench.ahead_of_time", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("compiled / predicted bytes: ")
