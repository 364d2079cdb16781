"""A schedule as flat arrays, so that rules over a million actions stay a few array operations.

A is the number of actions of all ranks together, rank 0's first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedules.core.action import KINDS, Action, SlicedAction, action_of
from schedules.core.timetable import Timetable

Result = TypeVar("Result")
Options = ParamSpec("Options")
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

F, B, I, W = range(4)  # noqa: E741  positions in KINDS, and the letters of the grammar
_CODE = np.zeros(128, np.int64)  # ASCII -> position in KINDS
_CODE[[ord(kind) for kind in KINDS]] = F, B, I, W


def once(
    function: Callable[Concatenate[Timetable, Options], Result],
) -> Callable[Concatenate[Timetable, Options], Result]:
    """Cache a function's results for a schedule in the schedule object, if it is immutable.

    `functools.cached_property` stores its results in the object too; a cache by value would have to
    hash a million actions at every lookup. The cached results are not part of the schedule:
    comparisons, copies and pickles ignore them, and they never change. Further arguments of the
    function are hashable, and each spelling of them has a result of its own.
    """
    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def cached(schedule: Timetable, /, *args: Options.args, **options: Options.kwargs) -> Result:
        parts = schedule.orders, schedule.placement, schedule.pairs, *schedule.orders
        if not all(type(part) is tuple for part in parts):
            # Made of lists, which the types forbid but Python allows.
            return function(schedule, *args, **options)
        results = vars(schedule).setdefault(name, {})
        key = args, *options.items()
        if key not in results:
            results[key] = function(schedule, *args, **options)
        result: Result = results[key]
        return result

    return cached


@dataclass(frozen=True, eq=False)
class Flat:
    """All actions of a schedule, column by column.

    Attributes:
      first: [S + 1] index of each rank's first action, then A.
      rank: [A] the rank whose order contains the action.
      stage: [A] its stage.
      kind: [A] its kind, as a position in `KINDS`.
      microbatch: [A] its microbatch; in a schedule with slices the number of its unit.
      in_range: [A] False for an entry that is no action of this schedule, which is stored as 0F0
        (0F0.0).
      pair: [A] True for the first action of an overlapped pair; the second is the next.
    """

    first: Ints
    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    in_range: Mask
    pair: Mask

    def by_rank(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """Split a column with an entry for each action into one array for each rank."""
        return np.split(column, self.first[1:-1])


@once
def flatten(schedule: Timetable) -> Flat:
    """Convert a schedule to arrays, whether it is legal or not."""
    actions = list(itertools.chain.from_iterable(schedule.orders))
    lengths = [len(order) for order in schedule.orders]
    sizes = (schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    in_range = np.ones(len(actions), bool)
    columns = _columns(actions, *sizes)
    if columns is None:
        in_range[:] = [_columns([action], *sizes) is not None for action in actions]
        nothing = action_of(0, "F", 0, sizes[2])
        actions = [a if ok else nothing for a, ok in zip(actions, in_range, strict=True)]
        columns = _columns(actions, *(max(1, size) for size in sizes)) or ((), (), ())
    stages, kinds, microbatches = columns
    letters = np.frombuffer("".join(kinds).encode(), np.uint8)
    first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    pair = np.zeros(len(actions), bool)
    valid = [first[rank] + at for rank, at, is_valid in scan_pairs(schedule) if is_valid]
    pair[valid] = True
    return Flat(
        first=first,
        rank=np.repeat(np.arange(schedule.num_ranks), lengths),
        stage=np.array(stages, np.int64),
        kind=_CODE[letters],
        microbatch=np.array(microbatches, np.int64),
        in_range=in_range,
        pair=pair,
    )


def is_dense(schedule: Timetable) -> bool:
    """Tell whether a table of K * M * N entries is in proportion to the number of actions.

    A legal schedule has at least that many actions; a mistyped number must not allocate the table.
    """
    actions = sum(map(len, schedule.orders))
    return schedule.num_stages * schedule.num_units <= 8 * actions + 4096


def codes(schedule: Timetable) -> Ints:
    """Return [A] the number of each action, ``(kind * K + stage) * U + unit`` for U units."""
    flat = flatten(schedule)
    row = flat.kind * schedule.num_stages + flat.stage
    return row * schedule.num_units + flat.microbatch


def takes_and_frees(kinds: Ints) -> tuple[Mask, Mask]:
    """Find the actions of a rank that take a place, at their start, or free one, at their end.

    Places are held as in the kernel: a stage input from the start of its F to the end of its B or
    I, and then the values that I keeps for W (a crossing) to the end of W. On a rank without
    backwards an input is held while F runs.
    """
    taken = kinds == F
    return taken, taken if taken.all() else (kinds == B) | (kinds == W)


def inputs_held(kinds: Ints) -> Ints:
    """Count the places that a rank holds during each of its actions, in order of time."""
    taken, freed = takes_and_frees(kinds)
    return np.cumsum(taken.astype(np.int64) - freed) + freed


def crossings_held(kinds: Ints) -> Ints:
    """Count the places that hold I's residuals for W, and no longer an input."""
    written, read = kinds == I, kinds == W
    return np.cumsum(written.astype(np.int64) - read) + read - written


def microbatches_held(
    schedule: Timetable, units_held: Callable[[Ints], Ints]
) -> list[NDArray[Any]]:
    """Count, in [S] arrays, what each rank holds during its actions, by `inputs_held` or another.

    A slice counts as 1/N of a microbatch; without slices the counts are integers.
    """
    flat, cut = flatten(schedule), schedule.num_slices
    counts = [units_held(kinds) for kinds in flat.by_rank(flat.kind)]
    return counts if cut == 1 else [units / cut for units in counts]


def scan_pairs(schedule: Timetable) -> Iterator[tuple[int, Any, bool]]:
    """Yield (rank, position, is valid) of each pair; a valid one is in range and overlaps none."""
    rows = schedule.pairs if isinstance(schedule.pairs, tuple) else ()
    for rank, positions in zip(range(schedule.num_ranks), rows, strict=False):
        lowest, last = 0, len(schedule.orders[rank]) - 1
        for position in positions if isinstance(positions, tuple) else ():
            is_valid = type(position) is int and lowest <= position < last
            lowest = position + 2 if is_valid else lowest
            yield rank, position, is_valid


def _columns(
    actions: Sequence[object], num_stages: int, num_microbatches: int, num_slices: int
) -> tuple[Sequence[int], Sequence[str], Sequence[int]] | None:
    """Return stages, kinds and units; None if an entry is no action of K, M and N.

    It uses only built-ins, for speed.
    """
    if not actions:
        return (), (), ()
    if set(map(type, actions)) != {Action if num_slices == 1 else SlicedAction}:
        return None
    stages, kinds, microbatches = (list(map(itemgetter(n), actions)) for n in range(3))  # type: ignore[arg-type]
    fits = (
        set(map(type, stages)) == set(map(type, microbatches)) == {int}
        and set(map(type, kinds)) == {str}
        and set(kinds) <= set(KINDS)
        and 0 <= min(stages) <= max(stages) < num_stages
        and 0 <= min(microbatches) <= max(microbatches) < num_microbatches
    )
    if not fits or num_slices == 1:
        return (stages, kinds, microbatches) if fits else None
    parts = list(map(itemgetter(3), actions))  # type: ignore[arg-type]
    if set(map(type, parts)) != {int} or not 0 <= min(parts) <= max(parts) < num_slices:
        return None
    units = [m * num_slices + n for m, n in zip(microbatches, parts, strict=True)]
    return stages, kinds, units
