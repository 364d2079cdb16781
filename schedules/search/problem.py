"""A scheduling problem as plain lists, for a search that times thousands of orders.

Letters as in `schedules.core.action`; C = 4 K M. Here an action is its code, ``(kind * K + stage) *
M + microbatch`` with kind a position in `KINDS`, and a message is the code of the F, or for
gradients of the I, whose end releases it (that of a B too).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.core.action import KINDS, Action
from schedules.core.costs import Costs
from schedules.core.flat import B, F, I, W, inputs_held
from schedules.schedule import Schedule

Orders = Sequence[Sequence[int]]  # [S] codes in order of time


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes, durations, placement and limit; what depends on an action is a list over all codes.

    Attributes:
      placement: [K] ranks.
      stages_of: [S] tuples of stages.
      num_microbatches: M.
      limit: stage inputs that a rank may hold.
      durations: [C].
      awaited: [C] the message that an action cannot start without, -1 for none.
      sent: [C] the message that it sends, -1 for none.
      reader: [C] the rank that reads what is sent, -1 for none.
      lag: [C] how long what is sent is under way.
    """

    placement: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    num_microbatches: int
    limit: float
    durations: list[float]
    awaited: list[int]
    sent: list[int]
    reader: list[int]
    lag: list[float]

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """S."""
        return len(self.stages_of)

    @property
    def prices_halves(self) -> bool:
        """Whether somewhere I and W take other than B."""
        size = self.num_stages * self.num_microbatches
        whole, inputs, weights = (self.durations[k * size : (k + 1) * size] for k in (B, I, W))
        return any(b != i + w for b, i, w in zip(whole, inputs, weights, strict=True))

    def code(self, kind: int, stage: int, microbatch: int) -> int:
        """The code of an action."""
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def action(self, code: int) -> Action:
        """The action of a code."""
        row, microbatch = divmod(code, self.num_microbatches)
        kind, stage = divmod(row, self.num_stages)
        return Action(stage, KINDS[kind], microbatch)

    def encode(self, schedule: Schedule) -> list[list[int]]:
        """[S] lists of codes."""
        row = {kind: position for position, kind in enumerate(KINDS)}
        return [[self.code(row[a.kind], a.stage, a.microbatch) for a in o] for o in schedule.orders]

    def decode(self, name: str, orders: Orders) -> Schedule:
        """The schedule with these orders."""
        actions = tuple(tuple(map(self.action, order)) for order in orders)
        return Schedule(name, self.num_microbatches, actions, self.placement)


def pose(
    placement: Sequence[int], num_ranks: int, num_microbatches: int, costs: Costs, limit: float
) -> Problem:
    """The problem of a placement under costs and a limit, of which only whole inputs count."""
    num_stages, each = len(placement), num_microbatches
    table, messages = costs.table(num_stages).tolist(), costs.messages(num_ranks).tolist()
    durations: list[float] = []
    awaited: list[int] = []
    sent: list[int] = []
    reader: list[int] = []
    lag: list[float] = []
    for kind, step in ((F, 1), (B, -1), (I, -1), (W, 0)):  # as in KINDS; step: to who reads it
        for stage, rank in enumerate(placement):
            first = ((I if kind == B else kind) * num_stages + stage) * each
            source = first - step * each
            sends = step != 0 and 0 <= stage + step < num_stages
            waits = step != 0 and 0 <= stage - step < num_stages
            to = placement[stage + step] if sends else -1
            durations += [table[kind][stage]] * each
            awaited += range(source, source + each) if waits else [-1] * each
            sent += range(first, first + each) if sends else [-1] * each
            reader += [to] * each
            lag += [messages[rank][to] if sends else 0.0] * each
    stages_of = tuple(
        tuple(k for k, rank in enumerate(placement) if rank == r) for r in range(num_ranks)
    )
    return Problem(
        placement=tuple(placement),
        stages_of=stages_of,
        num_microbatches=num_microbatches,
        limit=math.floor(limit) if math.isfinite(limit) else limit,
        durations=durations,
        awaited=awaited,
        sent=sent,
        reader=reader,
        lag=lag,
    )


def peak(problem: Problem, order: Sequence[int]) -> int:
    """The most stage inputs that a rank with this order holds at once."""
    kinds = np.array(order, np.int64) // (problem.num_stages * problem.num_microbatches)
    return int(inputs_held(kinds).max(initial=0))
