"""Windows: places for the whole weights and gradients of the chunks that a rank works on.

Letters: V chunks per rank, A actions of all ranks. If weights are sharded over several devices
(FSDP), a chunk is gathered once for a run of microbatches, and stays in its window while the rank's
actions read it. The gather runs during the action before the chunk's first. Gradients are treated
in the same way: the gradients of a run are summed in a window, and are reduced during the action
after the last. Two windows are enough if a rank takes all microbatches through one chunk after
another (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023). If a rank alternates
between chunks, each of these chunks has its own window.
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

Interval = tuple[int, int]  # the first and the last action of a run, by their numbers on the rank
BACKWARD = tuple(kind for kind in KINDS if kind != "F")


class Windows(NamedTuple):
    """The windows of a schedule, equal on every rank.

    Attributes:
      weights: [V] the window of each chunk's weights. Before a rank's first action chunk 0 is in
        its window.
      gradients: [V] the window of each chunk's gradients.
      gathers: [A] the chunk that is gathered during an action, -1 for none.
      reduces: [A] the chunk whose gradients are reduced during an action, -1 for none. Gradients
        that remain in a window are reduced after the last action.
    """

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    gathers: Ints
    reduces: Ints


def windows(schedule: Timetable) -> Windows:
    """Find windows for a schedule.

    A run is a rank's successive actions of one kind on one chunk. Weights are in their window from
    the action before a run to the run's last action, gradients from the first action to the action
    after the run. Chunks that are in windows at the same time on any rank have different windows.
    After a run a chunk stays in its window until another chunk takes it.
    """
    flat = flatten(schedule)
    chunks = np.asarray(schedule.chunk_of)[flat.stage]
    weights, gradients = _places(schedule, KINDS), _places(schedule, BACKWARD)
    gathers, reduces = (np.full(len(chunks), -1, np.int64) for _ in range(2))
    for start, stop in itertools.pairwise(flat.first.tolist()):
        whole, summed = {weights[0]: 0}, dict[int, tuple[int, int]]()
        for n, chunk in enumerate(chunks[start:stop].tolist(), start):
            # Gather a chunk one action early, so that the transfer overlaps with a matrix product.
            if whole.get(weights[chunk]) != chunk:
                whole[weights[chunk]] = chunk
                gathers[n - 1] = chunk
            if flat.kind[n] == F:
                continue
            # A window that another chunk takes is emptied during the action after its last use.
            before, last = summed.get(gradients[chunk], (chunk, n))
            if before != chunk:
                reduces[last + 1] = before
            summed[gradients[chunk]] = chunk, n
    return Windows(weights, gradients, gathers, reduces)


def _places(schedule: Timetable, kinds: Sequence[Kind]) -> tuple[int, ...]:
    """Find [V] the first window that is free on all ranks, for each chunk."""
    # Colour the chunks greedily: two chunks that meet on any rank get different windows.
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
    """Return [V] of [N, 2] the runs on each chunk, by the rank's action numbers, sorted."""
    chunk_of, order = schedule.chunk_of, schedule.orders[rank]
    intervals: list[list[Interval]] = [[] for _ in schedule.stages_of[rank]]
    for kind in kinds:
        of_kind = [(chunk_of[a.stage], n) for n, a in enumerate(order) if a.kind == kind]
        for chunk, run in itertools.groupby(of_kind, key=itemgetter(0)):
            numbers = [n for _, n in run]
            intervals[chunk].append((numbers[0], numbers[-1]))
    return [np.array(sorted(runs), np.int64).reshape(-1, 2) for runs in intervals]


def _meet(some: Ints, others: Ints) -> bool:
    """Tell whether runs of two chunks overlap, or follow one another without an action between."""
    begun = np.searchsorted(others[:, 0], some[:, 1] + 1, side="right")
    ended = np.concatenate([[-2], np.maximum.accumulate(others[:, 1])])  # of all runs before each
    return bool((some[:, 0] <= ended[begun] + 1).any())
