"""Random stage programs have the gradients of the plain model (tests/fuzz.py)."""

from __future__ import annotations

import pytest

from tests import fuzz

FAST, SLOW, ALL = range(4), range(4, 20), range(20, 300)
SETTLED = "ok", "chaotic", "not finite"


def seeds() -> list:
    slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
    marked = ((FAST, ()), (SLOW, (slow,)), (ALL, (slow, exhaustive)))
    return [pytest.param(seed, marks=marks) for some, marks in marked for seed in some]


@pytest.mark.parametrize("seed", seeds())
def test_a_random_program_has_the_gradients_of_the_plain_model(seed):
    assert fuzz.check(fuzz.draw(seed)) in SETTLED


def test_the_cases_are_of_all_kinds():
    cases = [fuzz.draw(seed) for seed in (*FAST, *SLOW)]
    for name in ("num_ranks", "num_stages", "schedule", "remat", "bubbles", "as_tree", "unlike"):
        assert len({getattr(case, name) for case in cases}) > 1


@pytest.mark.slow
def test_few_programs_have_nothing_to_compare():
    """A fuzzer that compares nothing passes."""
    assert [fuzz.check(fuzz.draw(seed)) for seed in list(FAST)[:4]].count("ok") >= 3
