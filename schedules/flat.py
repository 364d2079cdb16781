"""A schedule as flat arrays, so that rules over a million actions stay a few array operations.

Letters as in `schedules.ir`; A is the number of actions of all ranks together, rank 0's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedules.ir import KINDS, Action, Schedule

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

F, B, I, W = range(4)  # noqa: E741  positions in KINDS, and the letters of the grammar


@dataclass(frozen=True, eq=False)
class Flat:
    """All actions of a schedule, column by column.

    Attributes:
      first: [S + 1] index of each rank's first action, then A.
      rank: [A] the rank whose order it stands in.
      stage: [A] its stage.
      kind: [A] its kind, as a position in `KINDS`.
      microbatch: [A] its microbatch.
      in_range: [A] False for what is no action of this schedule; it stands here as 0F0.
      pair: [A] True for the first action of an overlapped pair; the second is the next.
    """

    first: Ints
    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    in_range: Mask
    pair: Mask


def flatten(schedule: Schedule) -> Flat:
    """Read a schedule, legal or not."""
    actions = list(itertools.chain.from_iterable(schedule.orders))
    sizes = (schedule.num_stages, schedule.num_microbatches)
    in_range = np.ones(len(actions), bool)
    if not _all_in_range(actions, *sizes):
        in_range[:] = [_all_in_range([action], *sizes) for action in actions]
        actions = [a if ok else Action(0, "F", 0) for a, ok in zip(actions, in_range, strict=True)]
    lengths = [len(order) for order in schedule.orders]
    code = {kind: position for position, kind in enumerate(KINDS)}
    first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    pair = np.zeros(len(actions), bool)
    pair[_pairs(schedule, first.tolist())] = True
    return Flat(
        first=first,
        rank=np.repeat(np.arange(schedule.num_ranks), lengths),
        stage=np.array([a[0] for a in actions], np.int64),
        kind=np.array([code[a[1]] for a in actions], np.int64),
        microbatch=np.array([a[2] for a in actions], np.int64),
        in_range=in_range,
        pair=pair,
    )


def is_dense(schedule: Schedule) -> bool:
    """Whether a table of K * M entries is in proportion to the actions that are there.

    A legal schedule has at least K * M actions; a mistyped number must not allocate memory.
    """
    actions = sum(map(len, schedule.orders))
    return schedule.num_stages * schedule.num_microbatches <= 8 * actions + 4096


def activations(order: Sequence[Action]) -> Ints:
    """[len(order)] stage inputs held while each action of a rank runs.

    An input is held from the start of its F to the end of its B or, split, of its W: the weight
    gradient needs it still. Without any backward it is held while F runs.
    """
    kinds = [action[1] for action in order]
    taken = np.array([kind == "F" for kind in kinds], np.int64)
    freed = np.array([kind in ("B", "W") for kind in kinds], np.int64)
    if "B" not in kinds and "I" not in kinds and "W" not in kinds:
        freed = taken
    held: Ints = np.cumsum(taken - freed) + freed
    return held


def _pairs(schedule: Schedule, first: Sequence[int]) -> list[int]:
    """Indices of the first actions of pairs; without those that fit no order or share an action."""
    found: list[int] = []
    rows = schedule.pairs if isinstance(schedule.pairs, tuple) else ()
    for rank, positions in zip(range(schedule.num_ranks), rows, strict=False):
        lowest, last = 0, first[rank + 1] - first[rank] - 1
        for position in positions if isinstance(positions, tuple) else ():
            if type(position) is int and lowest <= position < last:
                found.append(first[rank] + position)
                lowest = position + 2
    return found


def _all_in_range(actions: Sequence[object], num_stages: int, num_microbatches: int) -> bool:
    """Whether all are actions with numbers inside 0..K-1 and 0..M-1; built-ins only, for speed."""
    if not actions:
        return True
    if set(map(type, actions)) != {Action}:
        return False
    stages, kinds, microbatches = ([a[n] for a in actions] for n in range(3))  # type: ignore[index]
    return (
        set(map(type, stages)) == set(map(type, microbatches)) == {int}
        and set(map(type, kinds)) == {str}
        and set(kinds) <= set(KINDS)
        and 0 <= min(stages) <= max(stages) < num_stages
        and 0 <= min(microbatches) <= max(microbatches) < num_microbatches
    )
