"""How long a pipeline takes and what a rank holds at once, by name and sizes.

Letters: S ranks, V stages on each, M microbatches.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedules import Costs, Schedule, build, simulate
from schedules.core.flat import crossings_held, flatten, inputs_held

# The kernel's, with exchanges that only partners wait for; the same where all ranks meet, as on
# virtual CPU devices; and that in which a rank waits for its data alone.
CLOCKS = ("lockstep", "barriers", "event")
MOST = 100_000  # actions that are timed one by one
SHORT = 5  # M / S up to which nothing is taken to repeat
SAME = 1e-9  # relative


@functools.lru_cache(maxsize=1024)
def built(name: str, S: int, V: int, M: int) -> Schedule:
    """A family's schedule."""
    return build(name, num_ranks=S, num_microbatches=M, num_stages=S * V)


@functools.lru_cache(maxsize=8192)
def makespan(
    name: str, S: int, V: int, M: int, costs: Costs, shared: tuple[str, ...], clock: str
) -> float:
    """Seconds, without optimizer.

    In a long pipeline S more microbatches always take as long: then three short ones, S apart, say
    what it takes. Where they do not agree, it is timed in full, up to `MOST` actions.
    """

    def timed(m: int) -> float:
        one = built(name, S, V, m)
        if clock == "event":
            return simulate(one, costs, shared=shared).makespan
        sends: dict[str, Any] = {"partners": True, "delayed": None} if clock == "lockstep" else {}
        return simulate(one, costs, "lockstep", shared=shared, **sends).makespan

    if M <= SHORT * S:
        return timed(M)
    first = _first(S, M)
    a, b, c = (timed(first + n * S) for n in range(3))
    if abs((c - b) - (b - a)) > SAME * c and 3 * S * V * M <= MOST:
        return timed(M)
    return c + (c - b) * (M - first - 2 * S) / S


def peak(name: str, S: int, V: int, M: int, stash: float, crossing: float) -> float:
    """The most bytes that a rank holds for microbatches under way.

    Args:
      name: of the family.
      S: ranks.
      V: stages on each.
      M: microbatches.
      stash: bytes from a stage's F to its B or I.
      crossing: bytes from I to W.
    """
    if M <= SHORT * S:
        inputs, crossings = _held(name, S, V, M)
        return _most(inputs, crossings, stash, crossing)
    first = _first(S, M)
    b, c = (_most(*_held(name, S, V, first + n * S), stash, crossing) for n in (1, 2))
    return c + (c - b) * (M - first - 2 * S) / S


def _first(S: int, M: int) -> int:
    return 2 * S + M % S


def _most(inputs: NDArray[np.int64], crossings: NDArray[np.int64], a: float, c: float) -> float:
    return float((inputs * a + crossings * c).max())


@functools.lru_cache(maxsize=4096)
def _held(name: str, S: int, V: int, M: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and crossings that are held during any action, each pair once."""
    flat = flatten(built(name, S, V, M))
    rows = []
    for kinds in np.split(flat.kind, flat.first[1:-1]):
        crossings = crossings_held(kinds)
        rows.append(np.stack([inputs_held(kinds) - crossings, crossings]))
    inputs, crossings = np.unique(np.concatenate(rows, axis=1), axis=1)
    return inputs, crossings
