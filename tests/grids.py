"""Few cases out of a grid: as much as time allows, by value and not by habit."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

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
