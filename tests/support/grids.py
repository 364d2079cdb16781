"""Few cases out of a grid: as much as time allows, by value and not by habit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Hashable, Iterable

import pytest

Grid = Iterable[tuple[Hashable, ...]]


Places = Collection[tuple[int, int]]


def pairs(case: tuple[Hashable, ...], elsewhere: Places = ()) -> set:
    """Every two values of different factors that meet in a case.

    Args:
      case: a value of each factor.
      elsewhere: pairs of factors, by place, that are left out, as their values meet in another
        test; each value itself is not.
    """
    found = itertools.combinations(enumerate(case), 2)
    alone = {(value,) for value in enumerate(case)} if elsewhere else set()
    return {(a, b) for a, b in found if (a[0], b[0]) not in elsewhere} | alone


def covering(grid: Grid, start: Grid = (), elsewhere: Places = ()) -> list[tuple]:
    """Cases, beside those to start with, so that every two values that ever meet do meet."""
    of = functools.partial(pairs, elsewhere=elsewhere)
    grid = list(grid)
    missing = set().union(*map(of, grid)) - set().union(*map(of, start))
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(of(case) & missing))
        chosen.append(best)
        missing -= of(best)
    return chosen


def effort(case: Hashable, fast: Collection, slow: Collection) -> list[pytest.MarkDecorator]:
    """Place of a case of a grid: `make test`, CI, or `make test-all` alone."""
    if case in fast:
        return []
    return [pytest.mark.slow, *([] if case in slow else [pytest.mark.exhaustive])]
