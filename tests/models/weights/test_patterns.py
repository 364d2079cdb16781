"""Patterns: any slice of a weight out of slices of tensors, and tables that make no sense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.models.weights.tables import patterns
from pipeline.models.weights.tables.patterns import Row, plan, row

SIZES = {"d": 6, "k": 2, "g": 3, "c": 4, "f": 10, "h": 6, "o": 1, "z": 0}
Held = dict[str, np.ndarray]


def heads(t: Held) -> np.ndarray:
    q, k, v = (t[name].T.reshape(6, 2, -1) for name in "qkv")
    return np.concatenate([q, k, v], -1).reshape(6, -1)


def thirds(t: Held) -> np.ndarray:
    q, k, v = (x.reshape(6, 2, 4) for x in np.split(t["q"], 3, axis=1))
    return np.concatenate([q, k, v], -1).reshape(6, -1)


ROWS: list[tuple[Row, Callable[[Held], np.ndarray]]] = [
    (row("qkv", "d (k + c)", ("q", "(k +g c) d"), ("k", "(k c) d"), ("v", "(k c) d")), heads),
    (row("fused", "d (k + c)", ("q", "d (+3 k c)")), thirds),
    (row("out", "(h c) d", ("o", "d (h c)")), lambda t: t["o"].T),
    (row("both", "d + f", ("a", "f d"), ("b", "f d")), lambda t: np.stack([t["a"].T, t["b"].T], 1)),
    (row("bias", "+ f", ("a", "f"), ("b", "f")), lambda t: np.stack([t["a"], t["b"]])),
    (row("norm", "d", ("a", "d")), lambda t: t["a"]),
    (row("single", "(o f) d", ("a", "d (f o)")), lambda t: t["a"].T),
    (row("number", "", ("a", "")), lambda t: t["a"]),
    (row("empty", "z d", ("a", "d z")), lambda t: t["a"].T),
]


@pytest.mark.parametrize("block", [8, 100, 1 << 20])
@pytest.mark.parametrize(("row", "fused"), ROWS, ids=lambda one: getattr(one, "target", ""))
def test_any_slice(
    row: Row, fused: Callable[[Held], np.ndarray], block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patterns, "BLOCK", block)
    made, rng = plan(row, SIZES), np.random.default_rng(0)
    tensors = {part.name: rng.normal(size=part.shape) for part in made.parts}

    read = tensors.__getitem__
    whole = made.read(read, np.float64)
    np.testing.assert_array_equal(whole, fused(tensors))
    back = made.split(whole)
    assert {name: x.tobytes() for name, x in back.items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }
    for _ in range(100):
        index = [sorted(rng.integers(size + 1, size=2).tolist()) for size in made.shape]
        wanted = whole[tuple(slice(*one) for one in index)]
        out = np.full(wanted.shape, np.nan)
        made.fill(out, [(a, b) for a, b in index], read)
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            row("w", "d f", ("a", "d c")),
            (
                "row 'w': the pattern 'd c' of 'a' has the letters c d, that of the weight, 'd f', "
                "has d f; both name the same, each once"
            ),
        ),
        (
            row("w", "d y", ("a", "d y")),
            (
                "row 'w': the pattern 'd y' has the letter 'y', and the model has sizes for d k g "
                "c f h o z"
            ),
        ),
        (
            row("w", "d d", ("a", "d d")),
            "row 'w': the pattern 'd d' names 'd' twice; give the second a letter of its own",
        ),
        (
            row("w", "d f", ("a", "d f"), ("b", "d f")),
            "row 'w' has 2 sources and the pattern 'd f': say with + along which dim they lie",
        ),
        (
            row("w", "d ?", ("a", "d ?")),
            "row 'w': '?' of the pattern 'd ?' is no letter",
        ),
    ],
)
def test_a_row_that_makes_no_sense(row: Row, message: str):
    with pytest.raises(ValueError) as caught:
        plan(row, SIZES)
    assert str(caught.value) == message
