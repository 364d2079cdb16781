"""Work that all ranks do together if they share the ends of a model.

An embedding and a head may be split by vocabulary over the ranks. Then every rank has a part of
both ends. Before the slot with the first stage's F of a microbatch, all ranks look up their parts
of the microbatch's words. After the slot with the last stage's F, they run the head, each on its
part of the vocabulary; this also gives the gradient that the last stage's backward starts from.
After the slot with the first stage's B or I, they add that gradient to their rows. The first and
the last stage are then stages like all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.core.action import ScheduleError, shorten
from schedules.core.costs import Costs, Times
from schedules.core.flat import B, F, I, Ints, Mask, flatten
from schedules.core.schedule import Schedule

SHARED = ("embed", "head")
Shared = tuple[str, ...]


class Together(NamedTuple):
    """The microbatch (with slices, the unit) of the ranks' shared work around each slot.

    -1 means none.

    Attributes:
      lookup: [times] the embedding, before the slot.
      head: [times] forward, loss and gradients, after the slot.
      scatter: [times] the embedding's gradient, after the slot.
    """

    lookup: NDArray[np.int32]
    head: NDArray[np.int32]
    scatter: NDArray[np.int32]


def parts(shared: Iterable[str]) -> Shared:
    """Order the names of the shared ends."""
    names = (shared,) if isinstance(shared, str) else shared
    listed = tuple(names) if isinstance(names, Iterable) else (names,)
    if any(not isinstance(part, str) or part not in SHARED for part in listed):
        raise ScheduleError(
            f"shared={shorten(shared)}: ranks can share 'embed', 'head', or both; give those of "
            f"them that are split by vocabulary, such as shared=('embed', 'head')"
        )
    return tuple(part for part in SHARED if part in listed)


def together(schedule: Schedule, times: Ints, count: int, shared: Shared) -> Together:
    """Find the units that all ranks work on around each of ``count`` slots.

    ``times`` [A] is the slot of each action.
    """
    columns = np.full((3, count), -1, np.int32)
    for column, does in zip(columns, actions_beside(schedule, shared), strict=True):
        column[times[does]] = flatten(schedule).microbatch[does]
    return Together(*columns)


class Beside(NamedTuple):
    """[A] whether all ranks run a lookup before an action, or head or scatter after it."""

    lookup: Mask
    head: Mask
    scatter: Mask


def actions_beside(schedule: Schedule, shared: Shared) -> Beside:
    """Find the actions next to which all ranks work together."""
    flat, last = flatten(schedule), schedule.num_stages - 1
    of = ("embed", 0, (F,)), ("head", last, (F,)), ("embed", 0, (B, I))
    return Beside(
        *((flat.stage == k) & np.isin(flat.kind, kinds) & (part in shared) for part, k, kinds in of)
    )


def lasting(
    work: Together, costs: Costs, num_ranks: int, num_slices: int = 1
) -> tuple[Times, Times]:
    """Return [times] durations of the ranks' shared work before and after each slot."""
    shares = costs.shares(num_slices)

    def take(units: NDArray[np.int32], whole: float) -> Times:
        share = 1.0 if num_slices == 1 else shares[units % num_slices]
        lasts: Times = np.where(units >= 0, whole / num_ranks * share, 0.0)
        return lasts

    after = take(work.head, costs.head)
    return take(work.lookup, costs.embed), after + take(work.scatter, costs.embed)


def keep_together(costs: Costs, shared: Shared) -> Costs:
    """Give shared work without duration a tiny one: ranks that run it as one program still meet."""
    tiny = 1e-9 * max(float(np.max(of)) for of in (costs.f, costs.i, costs.w)) or 1e-9
    lasting: dict[str, Any] = {end: getattr(costs, end) or tiny for end in shared}
    return replace(costs, **lasting)
