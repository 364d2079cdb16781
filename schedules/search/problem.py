"""A scheduling problem as plain lists, for a search that times thousands of orders.

C = 4 K M. An action is a code (`schedules.core.flat.codes`), a message a number
(`schedules.core.messages`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedules.core.action import KINDS, Action
from schedules.core.costs import Costs
from schedules.core.flat import B, I, W, codes, flatten, inputs_held
from schedules.core.messages import connect
from schedules.core.schedule import Schedule

Orders = Sequence[Sequence[int]]  # [S] codes in order of time


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes, durations, placement and limit; lists over all codes hold the values of actions.

    Attributes:
      placement: [K] the rank of each stage.
      limit: the number of stage inputs that a rank may hold.
      awaited: [C] the message that an action needs to start, -1 for none.
      sent: [C] the message that an action sends, -1 for none.
      reader: [C] the rank that receives that message, -1 for none.
      lag: [C] the duration of that message.
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
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.stages_of)

    @property
    def prices_halves(self) -> bool:
        """True if some B takes a different time than its I and W together."""
        size = self.num_stages * self.num_microbatches
        whole, inputs, weights = (self.durations[k * size : (k + 1) * size] for k in (B, I, W))
        return any(b != i + w for b, i, w in zip(whole, inputs, weights, strict=True))

    def code(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def action(self, code: int) -> Action:
        row, microbatch = divmod(code, self.num_microbatches)
        kind, stage = divmod(row, self.num_stages)
        return Action(stage, KINDS[kind], microbatch)

    def encode(self, schedule: Schedule) -> list[list[int]]:
        return [row.tolist() for row in flatten(schedule).by_rank(codes(schedule))]

    def decode(self, name: str, orders: Orders) -> Schedule:
        actions = tuple(tuple(map(self.action, order)) for order in orders)
        return Schedule(name, self.num_microbatches, actions, self.placement)


def pose(
    placement: Sequence[int], num_ranks: int, num_microbatches: int, costs: Costs, limit: float
) -> Problem:
    """Make the problem of a placement under costs and a limit; the limit is rounded down."""
    shape = len(KINDS), len(placement), num_microbatches
    kind, stage, microbatch = (column.ravel() for column in np.indices(shape))
    ranks = np.array(placement, np.int64)
    rank = ranks[stage]
    wires = connect(kind, stage, microbatch, rank, ranks, num_microbatches)
    stages_of = tuple(
        tuple(k for k, rank in enumerate(placement) if rank == r) for r in range(num_ranks)
    )
    return Problem(
        placement=tuple(placement),
        stages_of=stages_of,
        num_microbatches=num_microbatches,
        limit=math.floor(limit) if math.isfinite(limit) else limit,
        durations=costs.table(len(placement))[kind, stage].tolist(),
        awaited=wires.awaited.tolist(),
        sent=wires.sent.tolist(),
        reader=np.where(wires.sent < 0, -1, wires.target).tolist(),
        lag=costs.lags(rank, wires.target, num_ranks).tolist(),
    )


def peak(problem: Problem, order: Sequence[int]) -> int:
    """Return the most stage inputs that a rank with this order holds at once."""
    kinds = np.array(order, np.int64) // (problem.num_stages * problem.num_microbatches)
    return int(inputs_held(kinds).max(initial=0))
