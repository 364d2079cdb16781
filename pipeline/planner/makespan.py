"""Makespan of a schedule and peak memory of a rank, by name and sizes.

Letters: S ranks, V stages on each, M microbatches, N slices of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from schedules import Costs, Schedule, build, lower, simulate
from schedules.build import takes_slices
from schedules.clocks.hosted import Keep
from schedules.clocks.windows import windows
from schedules.core.flat import crossings_held, flatten, inputs_held

# The kernel's, with exchanges that only partners wait for; the same where all ranks meet, as on
# virtual CPU devices; and that in which a rank waits for its data alone.
CLOCKS = ("lockstep", "barriers", "event")
MOST = 100_000  # actions that are timed one by one
SHORT = 5  # M / S up to which nothing is taken to repeat
SAME = 1e-9  # relative


@functools.lru_cache(maxsize=1024)
def built(name: str, S: int, V: int, M: int, N: int = 1) -> Schedule:
    """A family's schedule."""
    slices = N if takes_slices(name) else None
    return build(name, num_ranks=S, num_microbatches=M, num_stages=S * V, num_slices=slices)


@functools.lru_cache(maxsize=8192)
def makespan(
    name: str,
    S: int,
    V: int,
    M: int,
    costs: Costs,
    shared: tuple[str, ...],
    clock: str,
    offload: float | None = None,
    keep: Keep = "residuals",
    N: int = 1,
) -> float:
    """Seconds, without optimizer; with ``offload`` and ``keep`` of `schedules.simulate`.

    In a long pipeline S more microbatches always take as long: then three short ones, S apart, say
    what it takes. Where they do not agree, it is timed in full, up to `MOST` actions.
    """
    moved: dict[str, Any] = {"offload": offload, "keep": keep}

    def timed(m: int) -> float:
        one = built(name, S, V, m, N)
        if clock == "event":
            return simulate(one, costs, shared=shared, **moved).makespan
        sends: dict[str, Any] = {"partners": True, "delayed": None} if clock == "lockstep" else {}
        return simulate(one, costs, "lockstep", shared=shared, **sends, **moved).makespan

    if M <= SHORT * S:
        return timed(M)
    first = _first(S, M)
    a, b, c = (timed(first + n * S) for n in range(3))
    if abs((c - b) - (b - a)) > SAME * c and 3 * S * V * M * N <= MOST:
        return timed(M)
    return c + (c - b) * (M - first - 2 * S) / S


def places(name: str, S: int, V: int, M: int, N: int = 1) -> tuple[float, float]:
    """Number of stashes a rank has room for, from F to B or I, and of crossings, from I to W.

    Of either kind as many as the rank has that needs most of them. With slices each is one of a
    slice.

    Args:
      name: of the family.
      S: ranks.
      V: stages on each.
      M: microbatches.
      N: slices of each.
    """
    stashes, crossings = _counted(lambda m: _held(name, S, V, m, N), S, M)
    return stashes, crossings


def windows_of(name: str, S: int, V: int, M: int) -> tuple[float, float, float, float]:
    """Windows of weights, and of gradients, that a rank has; chunks that it gathers, and reduces.

    Of a pipeline with ``gather="repeat"``; arguments are those of `places`.
    """
    found = _counted(lambda m: _windows(name, S, V, m), S, M)
    weights, gradients, gathers, reduces = found
    return weights, gradients, gathers, reduces


def _counted(count: Callable[[int], Sequence[float]], S: int, M: int) -> Sequence[float]:
    """Numbers of M microbatches; of many, by what S more add to those of few."""
    if M <= SHORT * S:
        return count(M)
    first = _first(S, M)
    b, c = (np.array(count(first + n * S)) for n in (1, 2))
    found: list[float] = (c + (c - b) * (M - first - 2 * S) / S).tolist()
    return found


@functools.lru_cache(maxsize=4096)
def _windows(name: str, S: int, V: int, M: int) -> tuple[int, int, int, int]:
    """Numbers of the rank that gathers most, and of that which reduces most."""
    one = built(name, S, V, M)
    found, cuts = windows(one), flatten(one).first[1:-1]
    gathers, reduces = (
        max(int((part >= 0).sum()) for part in np.split(beside, cuts))
        for beside in (found.gathers, found.reduces)
    )
    places = len(set(found.weights)), len(set(found.gradients))
    return *places, gathers + 1, reduces + places[1]


def _first(S: int, M: int) -> int:
    return 2 * S + M % S


@functools.lru_cache(maxsize=4096)
def _held(name: str, S: int, V: int, M: int, N: int) -> tuple[int, int]:
    """The most stashes, and the most crossings, that a rank holds during any action."""
    flat = flatten(built(name, S, V, M, N))
    stashes = crossings = 0
    for kinds in np.split(flat.kind, flat.first[1:-1]):
        left = crossings_held(kinds)
        crossings = max(crossings, int(left.max()))
        stashes = max(stashes, int((inputs_held(kinds) - left).max()))
    return stashes, crossings


@functools.lru_cache(maxsize=1024)
def carry_places(name: str, S: int, M: int, N: int) -> tuple[int, int]:
    """Number of carries a rank has room for, of slices, and of gradients for them.

    Args:
      name: of a family with slices.
      S: ranks.
      M: microbatches; beyond twice the ranks more of them need no more places.
      N: slices of each.
    """
    if N == 1:
        return 0, 0
    program = lower(built(name, S, 1, min(M, 2 * S + 1), N))
    return program.num_carries, program.num_carry_gradients
