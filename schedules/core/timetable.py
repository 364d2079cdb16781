"""A timetable: an order of actions for every rank, and a placement of stages on ranks.

Users have a `schedules.Schedule`, a timetable that reads and writes files and prints itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Self

from schedules.core.action import Action, Kind


@dataclass(frozen=True)
class Timetable:
    """Orders of actions and a placement of stages; clocks compute when the actions run.

    Attributes:
      name: the name of the family, or a name by the author; equality ignores it.
      num_microbatches: M.
      orders: [S] tuples of Action, the order of each rank.
      placement: [K] ranks, the rank that holds each stage.
      pairs: [S] tuples of ascending positions: the actions at p and p + 1 of that rank's order are
        an overlapped pair, F and then B or I of another stage. If a clock runs them as one, they
        start when both have their messages, and both send at their common end. ``()`` if no rank
        has a pair.
      num_slices: N, the number of slices of the sequences of every microbatch; 1 for whole
        sequences.
    """

    name: str = field(compare=False)
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...] = ()
    num_slices: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        # A schedule without pairs has only one form, so that equal schedules compare equal.
        if type(self.pairs) is tuple and all(type(row) is tuple and not row for row in self.pairs):
            object.__setattr__(self, "pairs", ())

    def __getstate__(self) -> dict[str, object]:
        """Return the fields for copies and pickles, without cached results."""
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}

    @property
    def num_ranks(self) -> int:
        """The number of ranks S."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.placement)

    @property
    def num_units(self) -> int:
        """The number of units that every stage runs, M * N (`schedules.core.action`)."""
        return self.num_microbatches * self.num_slices

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """[S] tuples of the stages on each rank, in layer order, by chunk."""
        stages: list[list[int]] = [[] for _ in self.orders]
        for stage, rank in enumerate(self.placement):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @functools.cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """[K] the local index of each stage on its rank."""
        chunk = {k: n for stages in self.stages_of for n, k in enumerate(stages)}
        return tuple(chunk[k] for k in range(self.num_stages))

    @functools.cached_property
    def is_forward(self) -> bool:
        """True for a timetable without any backward action: inference."""
        return kinds_in(self) <= {"F"}

    def forward(self) -> Self:
        """Copy the timetable with its forward actions only, and so without pairs."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return dataclasses.replace(self, orders=orders, pairs=())


def loop_placement(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Return [K] ranks: stage k on rank k % S."""
    return tuple(k % num_ranks for k in range(num_stages))


def actions_of(schedule: Timetable) -> list[Action]:
    """List [A] all actions, rank 0's first."""
    return list(itertools.chain.from_iterable(schedule.orders))


def kinds_in(schedule: Timetable) -> frozenset[Kind]:
    return frozenset(action.kind for action in actions_of(schedule))
