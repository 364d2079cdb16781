"""Tests compare arrays by one function, `tests.support.close`, so that other processors pass them.

Issue 38: `assert_allclose(rtol=1e-5, atol=0)` failed on an AMD machine, by 1.16e-5 of an entry that
was 0.005, far below the largest entry of its array.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from tests.support.close import assert_close, distance

ROOT = Path(__file__).parents[2]
ENTRY_BY_ENTRY = {"assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "allclose"}


def refused(source: str) -> list[int]:
    """Lines that name a function which compares two arrays entry by entry."""
    if not any(word in source for word in ENTRY_BY_ENTRY):
        return []
    names = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute | ast.Name))
    return sorted(
        name.lineno
        for name in names
        if (name.attr if isinstance(name, ast.Attribute) else name.id) in ENTRY_BY_ENTRY
    )


def test_no_test_compares_entry_by_entry() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{line}"
        for folder in ("tests", "bench")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in refused(file.read_text(encoding="utf-8"))
    }
    assert not found, "compare with tests.support.close.assert_close"


@pytest.mark.parametrize(
    "call",
    [
        "np.testing.assert_allclose(a, b, rtol=1e-5, atol=0)",
        "assert jnp.allclose(a, b)",
        "assert_allclose(a, b)",
        "jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), a, b)",
    ],
)
def test_a_call_that_compares_entry_by_entry_is_found(call: str) -> None:
    assert refused(f"x = 1\n{call}\n") == [2]


def test_a_small_entry_may_carry_the_rounding_of_a_large_one() -> None:
    wanted = np.array([1.0, 0.005], np.float32)
    assert_close(wanted + np.array([0, 6e-8], np.float32), wanted)
    assert distance(wanted + 2, wanted) == pytest.approx(2)


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ([1.0, 2.0], [1.0, 2.1], r"\['a'\]: differs by 0.0476 of its largest entry, at most 1e-05"),
        ([1.0, np.nan], [1.0, 2.0], r"\['a'\]: differs by inf of its largest entry"),
        ([1.0, np.inf], [1.0, -np.inf], r"\['a'\]: differs by inf of its largest entry"),
        ([1.0], [1.0, 2.0], r"\['a'\]: shape \(1,\), wanted \(2,\)"),
        ([0.0, 1e-4], [0.0, 0.0], r"\['a'\]: differs by 0.0001 of its largest entry"),
    ],
)
def test_a_difference_is_told_by_path(found, wanted, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close({"a": np.array(found)}, {"a": np.array(wanted)})


def test_equal_nan_and_infinity_agree() -> None:
    same = np.array([np.nan, np.inf, 1.0])
    assert_close([same, np.zeros((0, 3))], (same, np.zeros((0, 3))))
