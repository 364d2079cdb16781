"""Windows: places for the whole weights and gradients of the chunks that a rank works on.

Letters: V chunks per rank, A as in `schedules.core.flat`. Where weights lie in parts on several
devices (FSDP), a chunk is gathered when a rank comes to it and stays while the rank's actions read
it: for a run of microbatches, not for each. The next chunk is gathered beside the action before its
first. So are gradients: those of a run are summed up whole in a window, and shared out beside the
action after the last. Two windows are enough where a rank takes all microbatches through one chunk
after the other (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023); where it goes back
and forth between chunks, each of these has one of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from schedules.core.action import KINDS, Kind
from schedules.core.flat import F, Ints, flatten
from schedules.core.timetable import Timetable

Interval = tuple[int, int]  # the first and the last of a rank's actions
BACKWARD = tuple(kind for kind in KINDS if kind != "F")


class Windows(NamedTuple):
    """Windows of a schedule, the same on every rank.

    Attributes:
      weights: [V] the window of each chunk's weights. Before a rank's first action chunk 0 is in
        its own.
      gradients: [V] the window of each chunk's gradients.
      gathers: [A] the chunk that is gathered during an action, -1 for none.
      reduces: [A] the chunk whose gradients are reduced during an action, -1 for none. Gradients
        left in a window are reduced after the last action.
    """

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    gathers: Ints
    reduces: Ints


def windows(schedule: Timetable) -> Windows:
    """Find windows for a schedule.

    A run is a rank's successive actions of one kind on one chunk. Weights are in their window from
    the action before a run to its last action, gradients from the first action to the action after
    the run. Chunks that are in windows at the same time on any rank have different windows. A chunk
    stays after a run until another chunk takes its window.

    Args:
      schedule: a legal schedule.
    """
    flat = flatten(schedule)
    chunks = np.asarray(schedule.chunk_of)[flat.stage]
    weights, gradients = _places(schedule, KINDS), _places(schedule, BACKWARD)
    gathers, reduces = (np.full(len(chunks), -1, np.int64) for _ in range(2))
    for start, stop in itertools.pairwise(flat.first.tolist()):
        whole, summed = {weights[0]: 0}, dict[int, tuple[int, int]]()
        for n, chunk in enumerate(chunks[start:stop].tolist(), start):
            # Gather a chunk one action early, so that the transfer runs beside a product.
            if whole.get(weights[chunk]) != chunk:
                whole[weights[chunk]] = chunk
                gathers[n - 1] = chunk
            if flat.kind[n] == F:
                continue
            # A window that another chunk takes is emptied beside the action after its last use.
            before, last = summed.get(gradients[chunk], (chunk, n))
            if before != chunk:
                reduces[last + 1] = before
            summed[gradients[chunk]] = chunk, n
    return Windows(weights, gradients, gathers, reduces)


def _places(schedule: Timetable, kinds: Sequence[Kind]) -> tuple[int, ...]:
    """Find [V] the first free window for each chunk, on all ranks.

    Args:
      schedule: whose chunks they are.
      kinds: of actions that use a window.
    """
    # Colour the chunks greedily: two that meet on any rank get windows of their own.
    runs = [_runs(schedule, rank, kinds) for rank in range(schedule.num_ranks)]
    places: list[int] = []
    for chunk in range(schedule.num_stages // schedule.num_ranks):
        taken = {
            places[other]
            for other in range(chunk)
            if any(_meet(of_rank[chunk], of_rank[other]) for of_rank in runs)
        }
        places.append(next(n for n in itertools.count() if n not in taken))
    return tuple(places)


def _runs(schedule: Timetable, rank: int, kinds: Sequence[Kind]) -> list[Ints]:
    """[V] of [N, 2] the runs on each chunk, by the numbers of the rank's actions; in order."""
    chunk_of, order = schedule.chunk_of, schedule.orders[rank]
    intervals: list[list[Interval]] = [[] for _ in schedule.stages_of[rank]]
    for kind in kinds:
        of_kind = [(chunk_of[a.stage], n) for n, a in enumerate(order) if a.kind == kind]
        for chunk, run in itertools.groupby(of_kind, key=itemgetter(0)):
            numbers = [n for _, n in run]
            intervals[chunk].append((numbers[0], numbers[-1]))
    return [np.array(sorted(runs), np.int64).reshape(-1, 2) for runs in intervals]


def _meet(some: Ints, others: Ints) -> bool:
    """Tell whether a run begins before another has ended and one more action is done."""
    begun = np.searchsorted(others[:, 0], some[:, 1] + 1, side="right")
    ended = np.concatenate([[-2], np.maximum.accumulate(others[:, 1])])  # of those before each
    return bool((some[:, 0] <= ended[begun] + 1).any())
