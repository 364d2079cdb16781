"""bench/ahead_of_time.py: the TPU compiler's bytes of a small Llama beside the counted ones."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python


@pytest.mark.slow
def test_compiled_arguments_of_a_small_llama_are_the_counted_ones() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")
    done = python("-m", "bench.ahead_of_time", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("compiled / counted arguments: ")
