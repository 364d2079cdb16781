"""The makespan of a schedule and the values that a rank holds, by name and sizes.

An order is the name of a family, S ranks, V stages on each, M microbatches. The name of a family in
rounds of g microbatches is that of its schedule, such as "interleaved_zb, group=4".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from schedules import Costs, Schedule, build, simulate
from schedules.core.flat import crossings_held, flatten, inputs_held
from schedules.lowering.hosted import Keep
from schedules.lowering.windows import windows

Order = tuple[str, int, int, int]
# The kernel's clock, in which partners wait for each other; the same where all ranks meet at every
# exchange, as on virtual CPU devices; and one in which a rank waits only for its data.
CLOCKS: dict[str, dict[str, Any]] = {
    "lockstep": {"clock": "lockstep", "partners": True, "delayed": None},
    "barriers": {"clock": "lockstep"},
    "event": {"clock": "event"},
}
GROUP = ", group="  # between a family's name and the size of its rounds
MOST = 100_000  # actions that are timed one by one
SHORT = 5  # M / S up to which nothing is taken to repeat
SAME = 1e-9  # relative


@functools.lru_cache(maxsize=1024)
def built(order: Order, microbatches: int | None = None) -> Schedule:
    """Build a family's schedule, with another number of microbatches if given."""
    name, S, V, M = order
    family, _, size = name.partition(GROUP)
    sizes: dict[str, Any] = {
        "num_ranks": S,
        "num_microbatches": microbatches or M,
        "num_stages": S * V,
    }
    return build(family, **sizes, group=int(size) if size else None)


@functools.lru_cache(maxsize=8192)
def makespan(
    order: Order,
    costs: Costs,
    shared: tuple[str, ...],
    clock: str,
    offload: float | None = None,
    keep: Keep = "residuals",
) -> float:
    """Compute the seconds without optimizer; arguments are as for `schedules.simulate`.

    In a long pipeline a round more always takes as long: then three short ones, a round apart, say
    how long it takes. Where they do not agree, it is timed in full, up to `MOST` actions.
    """
    _, S, V, M = order
    options = CLOCKS[clock]

    def timed(m: int) -> float:
        one = built(order, m)
        found = simulate(one, costs, shared=shared, offload=offload, keep=keep, **options)
        return found.makespan

    first, size = _short(order)
    if max(SHORT * S, first + 2 * size) >= M:
        return timed(M)
    a, b, c = (timed(first + n * size) for n in range(3))
    if abs((c - b) - (b - a)) > SAME * c and 3 * S * V * M <= MOST:
        return timed(M)
    return c + (c - b) * (M - first - 2 * size) / size


def _short(order: Order) -> tuple[int, int]:
    """Return the microbatches of a short pipeline, and of a round; rounds extend it to M."""
    name, S, _, M = order
    group = name.partition(GROUP)[2]
    if not group:
        return 2 * S + M % S, S
    # As many rounds lack one microbatch as M lacks for whole rounds; some round must be whole.
    size = int(group)
    missing = -M % size
    if missing and 2 * (size - 1) < S:  # there is one round less, and what is left over is added
        more = size - missing
        return max(-(-2 * S // size), more + 1) * size + more, size
    return max(-(-2 * S // size), missing + 1) * size - missing, size


def _repeated(count: Callable[[Order], Sequence[int]], order: Order) -> Sequence[float]:
    """Compute numbers for M microbatches; large M adds rounds to numbers for few."""
    name, S, V, M = order
    first, size = _short(order)
    if max(SHORT * S, first + 2 * size) >= M:
        return count(order)
    b, c = (np.array(count((name, S, V, first + n * size))) for n in (1, 2))
    found: list[float] = (c + (c - b) * (M - first - 2 * size) / size).tolist()
    return found


def places(order: Order) -> Sequence[float]:
    """Number of stashes from F to B or I, and of crossings from I to W, on the rank with most."""
    return _repeated(_places, order)


@functools.lru_cache(maxsize=4096)
def _places(order: Order) -> tuple[int, int]:
    flat = flatten(built(order))
    stashes = crossings = 0
    for kinds in np.split(flat.kind, flat.first[1:-1]):
        left = crossings_held(kinds)
        crossings = max(crossings, int(left.max()))
        stashes = max(stashes, int((inputs_held(kinds) - left).max()))
    return stashes, crossings


def windows_of(order: Order) -> Sequence[float]:
    """Count a rank's windows of weights and gradients, its gathers and its reductions.

    They are those of a pipeline with ``gather="repeat"``, on the rank with most.
    """
    return _repeated(_windows, order)


@functools.lru_cache(maxsize=4096)
def _windows(order: Order) -> tuple[int, int, int, int]:
    found, cuts = windows(built(order)), flatten(built(order)).first[1:-1]
    gathers, reduces = (
        max(int((part >= 0).sum()) for part in np.split(actions, cuts))
        for actions in (found.gathers, found.reduces)
    )
    weights, gradients = len(set(found.weights)), len(set(found.gradients))
    return weights, gradients, gathers + 1, reduces + gradients
