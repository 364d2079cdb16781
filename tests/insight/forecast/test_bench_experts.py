"""Benchmarks of experts: a layer by hand is ours (issue 40)."""

from __future__ import annotations

import pytest

from tests.support.elsewhere import python

# In a process of its own: the package is for those that have not imported jax.
CODE = """
from bench import experts
for dispatch in experts.DISPATCHES:
    for R in (1, 2):
        _, (pipe, compiled, off) = experts.pair(experts.SMALL, dispatch, R)
        assert off <= experts.SMALL.tolerance
        row = experts.bytes_of(experts.SMALL, R, dispatch, pipe, compiled)
        assert row[1] == f"{experts.SMALL.weight_bytes(R) / 1e6:.2f}"
experts.gathered_by_hand = lambda w, x, top, chosen, R: x
try:
    experts.pair(experts.SMALL, "gather", 1)
except experts.ContradictionError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_is_timed_beside_a_layer_by_hand_agrees_with_it() -> None:
    done = python("-c", CODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gather over 1 ranks: ")
    assert done.stdout.endswith(" off the layer by hand, not 0.0001\n")
