"""Random stage programs have the gradients of the plain model (tests/fuzz.py)."""

from __future__ import annotations

import pytest

from tests import fuzz

FAST, SLOW = (0, 1), (*range(2, 10), 16, 19)  # 19: stages that are not alike
ALL = sorted({*range(300)} - {*FAST, *SLOW})
SETTLED = "ok", "chaotic", "not finite"


def seeds() -> list:
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    marked = ((FAST, ()), (SLOW, (slow,)), (ALL, (slow, exhaustive)))
    return [pytest.param(seed, marks=marks) for some, marks in marked for seed in some]


@pytest.mark.few
@pytest.mark.parametrize("seed", seeds())
def test_a_random_program_has_the_gradients_of_the_plain_model(seed):
    settled = fuzz.check(fuzz.draw(seed))
    # A fuzzer that compares nothing passes.
    assert settled == "ok" if seed in FAST else settled in SETTLED


def test_the_cases_are_of_all_kinds():
    cases = [fuzz.draw(seed) for seed in (*FAST, *SLOW)]
    for name in ("num_ranks", "num_stages", "schedule", "remat", "as_tree", "unlike"):
        assert len({getattr(case, name) for case in cases}) > 1
