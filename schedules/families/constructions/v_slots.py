"""V-shaped timetables from a pattern of slots that one microbatch takes and all others repeat.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv:2405.15362. Rank r
holds stage r and stage 2S - 1 - r. A microbatch takes four steps on every rank: F on the way there,
F on the way back, I on the way back, I on the way there. A pattern gives the slots of these steps
for microbatch 0; a slot is one action long. Microbatch m takes its steps 6m slots later, so two of
six slots are left for W. The time for which a pattern holds a microbatch's inputs determines how
many inputs are held at once.

Only the steady state keeps these slots. Before and after it, actions move up as far as their
dependencies permit, while no rank holds more than in the steady state. N is the number of slots of
a timetable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from schedules.core.action import Action, Kind
from schedules.core.flat import Ints
from schedules.core.schedule import Schedule

PERIOD = 6  # slots for each microbatch on every rank: F, I and W of two stages
STEPS: tuple[tuple[int, Kind], ...] = ((0, "F"), (1, "F"), (1, "I"), (0, "I"))  # (chunk, kind)
WEIGHT = len(STEPS)  # the number of the step W, in the order of I on its rank

Slots = tuple[int, int, int, int]


def from_pattern(name: str, num_microbatches: int, pattern: Sequence[Slots]) -> Schedule:
    """Build a schedule from [S] the slots of the four steps of microbatch 0 on each rank.

    The slots of a rank differ modulo 6, and each step is later than its dependencies.
    """
    num_ranks = len(pattern)
    few = distinct(num_ranks, num_microbatches)
    more = num_microbatches - few
    slots, weights = _settle(pattern, few)
    end = slots[0, 0, -1]  # the end of the steady state: rank 0's last F
    orders = []
    for rank in range(num_ranks):
        stages = rank, 2 * num_ranks - 1 - rank
        timed = sorted(_actions(slots[rank], weights[rank], stages))
        order = [action for slot, action in timed if slot < end]
        again = [action for slot, action in timed if end - PERIOD <= slot < end]
        order += [Action(k, kind, m + n) for n in range(1, more + 1) for k, kind, m in again]
        order += [Action(k, kind, m + more) for slot, (k, kind, m) in timed if slot >= end]
        orders.append(tuple(order))
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule(name, num_microbatches, tuple(orders), placement)


def distinct(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of microbatches to settle; later ones repeat the steady state."""
    return min(num_microbatches, 2 * num_ranks + 4)


def _settle(pattern: Sequence[Slots], num_microbatches: int) -> tuple[Ints, Ints]:
    """Return [S, 4, M] slots of the steps and [S, 2M] of W: the pattern with both ends moved up."""
    slots = np.array(pattern)[..., None] + PERIOD * np.arange(num_microbatches)
    weights = np.stack([_fill(row) for row in slots])
    first = slots[0, 3, 0]  # rank 0's first I, on the way there, ends the warm-up
    _move_up(slots, weights, lambda slot: slot < first)
    _squeeze(slots, weights)
    last = slots[0, 0, -1]  # the last action that the steady state starts: rank 0's last F
    _move_up(slots, None, lambda slot: slot > last)
    return slots, np.stack([_fill(row) for row in slots])


def _move_up(slots: Ints, weights: Ints | None, moves: Callable[[int], bool]) -> None:
    """Move actions to the first slot that is free and that dependencies and memory allow.

    Args:
      slots: [S, 4, M], changed in place.
      weights: [S, 2M], changed in place: W moves like any action. None: W fills free slots.
      moves: a function that tells whether to move the action in a slot.
    """
    limit = max(_peak(slots, weights, rank) for rank in range(len(slots)))
    taken: list[set[int]] = [set() for _ in slots]
    for slot, rank, step, m in _in_time(slots, weights):
        row = slots[rank, step] if step < WEIGHT else weights[rank]  # type: ignore[index]
        if moves(slot):
            for better in range(_earliest(slots, weights, rank, step, m), slot):
                if better not in taken[rank]:
                    row[m] = better
                    if _peak(slots, weights, rank) <= limit:
                        break
                    row[m] = slot
        taken[rank].add(int(row[m]))


def _squeeze(slots: Ints, weights: Ints) -> None:
    """Start every action as soon as its rank and its inputs permit; no order changes."""
    free = [0] * len(slots)
    for _, rank, step, m in _in_time(slots, weights):
        slot = max(free[rank], _earliest(slots, weights, rank, step, m))
        (slots[rank, step] if step < WEIGHT else weights[rank])[m] = slot
        free[rank] = slot + 1


def _earliest(slots: Ints, weights: Ints | None, rank: int, step: int, m: int) -> int:
    """Find the slot after all inputs of an action, and after the same action for m - 1."""
    if step == WEIGHT:
        after = int(np.sort(slots[rank, 2:], axis=None)[m])
        return 1 + max(after, int(weights[rank, m - 1]) if m else -1)  # type: ignore[index]
    after = int(slots[rank, step, m - 1]) if m else -1
    neighbour = rank + (-1 if step % 2 == 0 else 1)  # the rank that sends the microbatch
    if 0 <= neighbour < len(slots):
        after = max(after, int(slots[neighbour, step, m]))
    elif step:
        after = max(after, int(slots[rank, step - 1, m]))
    return 1 + after


def _peak(slots: Ints, weights: Ints | None, rank: int) -> int:
    """Return the most inputs that a rank holds at once."""
    row = slots[rank]
    freed = _fill(row) if weights is None else weights[rank]
    size = int(max(row.max(), freed.max())) + 1
    taken = np.bincount(row[:2].ravel(), minlength=size)
    return int(np.cumsum(taken - np.bincount(freed, minlength=size)).max())


def _fill(row: Ints) -> Ints:
    """Return [2M] the free slots for W, each the first one after its I and after the previous W.

    Args:
      row: [4, M] the slots of a rank.
    """
    owed = np.sort(row[2:], axis=None)
    is_free = np.ones(row.max() + 1 + len(owed), bool)
    is_free[row] = False
    free = np.flatnonzero(is_free)
    count = np.arange(len(owed))
    filled: Ints = free[np.maximum.accumulate(np.searchsorted(free, owed) - count) + count]
    return filled


def _in_time(slots: Ints, weights: Ints | None) -> list[tuple[int, int, int, int]]:
    """List (slot, rank, step, number) of all actions, sorted by slot.

    The number counts the actions of one step on one rank.
    """
    entries = [(slot, *index) for index, slot in np.ndenumerate(slots)]
    if weights is not None:
        entries += [(slot, rank, WEIGHT, n) for (rank, n), slot in np.ndenumerate(weights)]
    return sorted((int(slot), *index) for slot, *index in entries)


def _actions(row: Ints, weights: Ints, stages: tuple[int, int]) -> Iterator[tuple[int, Action]]:
    """Yield (slot, action) of all actions of a rank."""
    for (chunk, kind), slots in zip(STEPS, row.tolist(), strict=True):
        for m, slot in enumerate(slots):
            yield slot, Action(stages[chunk], kind, m)
    owed = sorted(
        (slot, stages[STEPS[step][0]], m)
        for step in (2, 3)
        for m, slot in enumerate(row[step].tolist())
    )
    for slot, (_, stage, m) in zip(weights.tolist(), owed, strict=True):
        yield slot, Action(stage, "W", m)
