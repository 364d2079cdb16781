"""The makespan of a schedule, and the number of values that a rank holds, by name and sizes.

An order has the name of a family, S ranks, V stages on each, and M microbatches. A family with
rounds of g microbatches has the name of its schedule, such as "interleaved_zb, group=4".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from schedules import Costs, Schedule, build, simulate
from schedules.clocks.hosted import Keep
from schedules.core.flat import crossings_held, flatten, inputs_held
from schedules.lowering.windows import windows

Order = tuple[str, int, int, int]
# lockstep: the kernel's clock, in which partners wait for each other. barriers: all ranks meet at
# every exchange, as on virtual CPU devices. event: a rank waits only for its data.
CLOCKS: dict[str, dict[str, Any]] = {
    "lockstep": {"clock": "lockstep", "partners": True, "delayed": None},
    "barriers": {"clock": "lockstep"},
    "event": {"clock": "event"},
}
GROUP = ", group="  # between a family's name and the size of its rounds
MOST = 100_000  # the most actions that are simulated one by one
SHORT = 5  # M / S up to which a schedule is simulated whole
SAME = 1e-9  # largest relative difference of equal times


@functools.lru_cache(maxsize=1024)
def built(order: Order, microbatches: int | None = None) -> Schedule:
    """Build a family's schedule, optionally with another number of microbatches."""
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
    """Compute the seconds of a step without the optimizer, with arguments of `schedules.simulate`.

    In a long pipeline each further round takes equally long. So three short pipelines, a round
    apart, give the time of a round. If the differences between them are unequal, the pipeline is
    simulated in full, up to `MOST` actions.
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
    """Return the microbatches of a short pipeline and of a round; adding rounds reaches M."""
    name, S, _, M = order
    group = name.partition(GROUP)[2]
    if not group:
        return 2 * S + M % S, S
    # The short pipeline lacks as many microbatches for whole rounds as M; one round must be whole.
    size = int(group)
    missing = -M % size
    if missing and 2 * (size - 1) < S:  # there is one round less, and the rest is added to a round
        more = size - missing
        return max(-(-2 * S // size), more + 1) * size + more, size
    return max(-(-2 * S // size), missing + 1) * size - missing, size


def _repeated(count: Callable[[Order], Sequence[int]], order: Order) -> Sequence[float]:
    """Compute counts for M microbatches; for large M, by adding rounds to the counts for few."""
    name, S, V, M = order
    first, size = _short(order)
    if max(SHORT * S, first + 2 * size) >= M:
        return count(order)
    b, c = (np.array(count((name, S, V, first + n * size))) for n in (1, 2))
    found: list[float] = (c + (c - b) * (M - first - 2 * size) / size).tolist()
    return found


def places(order: Order) -> Sequence[float]:
    """Count stashes from F to B or I, and crossings from I to W, on the rank with most."""
    return _repeated(_places, order)


@functools.lru_cache(maxsize=4096)
def _places(order: Order) -> tuple[int, int]:
    flat = flatten(built(order))
    stashes = crossings = 0
    for kinds in flat.by_rank(flat.kind):
        left = crossings_held(kinds)
        crossings = max(crossings, int(left.max()))
        stashes = max(stashes, int((inputs_held(kinds) - left).max()))
    return stashes, crossings


def windows_of(order: Order) -> Sequence[float]:
    """Count a rank's windows of weights and of gradients, its gathers and its reductions.

    They are counted for a pipeline with ``gather="repeat"``, on the rank with the most.
    """
    return _repeated(_windows, order)


@functools.lru_cache(maxsize=4096)
def _windows(order: Order) -> tuple[int, int, int, int]:
    found, flat = windows(built(order)), flatten(built(order))
    gathers, reduces = (
        max(int((part >= 0).sum()) for part in flat.by_rank(actions))
        for actions in (found.gathers, found.reduces)
    )
    weights, gradients = len(set(found.weights)), len(set(found.gradients))
    return weights, gradients, gathers + 1, reduces + gradients
