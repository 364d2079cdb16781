"""Few cases out of a grid: as much as time allows, by value and not by habit."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable

import pytest

Grid = Iterable[tuple[Hashable, ...]]


def pairs(case: tuple[Hashable, ...]) -> set:
    """Every two values of different factors that meet in a case."""
    return set(itertools.combinations(enumerate(case), 2))


def covering(grid: Grid, start: Grid = ()) -> list[tuple]:
    """Cases, beside those to start with, so that every two values that ever meet do meet."""
    grid = list(grid)
    missing = set().union(*map(pairs, grid)) - set().union(*map(pairs, start))
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def effort(case: Hashable, fast: Collection, slow: Collection) -> list[pytest.MarkDecorator]:
    """Where a case of a grid runs: in `make test`, in CI, or in `make test-all` alone."""
    if case in fast:
        return []
    return [pytest.mark.slow, *([] if case in slow else [pytest.mark.exhaustive])]
