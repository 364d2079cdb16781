"""The heuristic of zb_auto (`schedules.families.zero_bubble`): rounds of F and I, W in the gaps.

A round is one F and one I per rank; W runs while a rank waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from schedules.core.action import KINDS, Action
from schedules.core.flat import F, I, W
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement


class Choices(NamedTuple):
    """Choices that the heuristic leaves open.

    Attributes:
      late: warm up with one more F, although the first I then starts late.
      skip: leave out an F that the next rank does not wait for.
      fill: run W in every wait, even one that is shorter than W and costs nothing.
    """

    late: bool
    skip: bool
    fill: bool

    def __str__(self) -> str:
        chosen = [name for name, value in self._asdict().items() if value]
        return f"zb_auto({', '.join(chosen)})"


@dataclass(eq=False)
class Plan:
    """A timetable under construction. A rank's F, I and W each run in ascending order."""

    num_microbatches: int
    table: list[list[int]]  # [4, S] durations, in a unit in which all are whole numbers
    lag: list[list[int]]  # [S, S] durations of messages
    limit: float
    weight_memory: float
    choices: Choices

    def __post_init__(self) -> None:
        num_ranks = len(self.lag)
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.count = [[0] * num_ranks for _ in KINDS]  # [4, S] number of actions so far
        self.clock = [0] * num_ranks  # [S] end of the last action
        self.bubble = [0] * num_ranks  # [S] waiting time since the first action
        self.begin = [0] * num_ranks  # [S] start of the first action
        # [4, S, <= M] the end of each action so far
        self.sent: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in KINDS]

    def warm_up(self) -> None:
        """Run the first F of every rank, then as many F as fit before the first I can start.

        A rank runs fewer F than the previous rank, unless the previous rank runs all.
        """
        last = len(self.clock) - 1
        for rank in range(last + 1):
            self.put(rank, F)
        more = [0] * (last + 1)
        arrives = self.clock[last] + self.table[I][last]
        for rank in reversed(range(last)):
            arrives += self.lag[rank + 1][rank]
            now, each = self.clock[rank], self.table[F][rank]
            most = min(self.num_microbatches, self.limit) - 1
            while more[rank] < most and (
                now < arrives if self.choices.late else now + each <= arrives
            ):
                more[rank] += 1
                now += each
            arrives = max(now, arrives) + self.table[I][rank]
        for rank in range(last + 1):
            if rank:
                fewer = more[rank - 1] < self.num_microbatches - 1
                more[rank] = max(0, min(more[rank], more[rank - 1] - fewer))
            for _ in range(more[rank]):
                self.put(rank, F)

    def forward(self) -> None:
        takes = [self.wants(rank) for rank in range(len(self.clock))]
        for rank in reversed(range(len(takes) - 1)):
            takes[rank] = takes[rank] and takes[rank + 1]
        for rank, take in enumerate(takes):
            if take and self.arrival(rank, F) is not None:
                while self.held(rank) + 1 > self.limit and self.has_weights(rank):
                    self.put(rank, W)
                if self.held(rank) + 1 <= self.limit:
                    self.place(rank, F)

    def backward(self) -> None:
        for rank in reversed(range(len(self.clock))):
            self.place(rank, I)

    def flush(self) -> None:
        for rank in range(len(self.clock)):
            while self.has_weights(rank):
                self.put(rank, W)

    def wants(self, rank: int) -> bool:
        """Tell whether a rank takes an F this round."""
        done = self.count[F]
        if done[rank] == self.num_microbatches:
            return False
        after = rank + 1
        if not self.choices.skip or after == len(done) or done[rank] < done[after] + 2:
            return True
        soonest = self.clock[after] + self.table[F][after] + self.table[I][after]
        wait = soonest + self.lag[after][rank] - self.clock[rank]
        if wait <= 0:
            return False
        over = max(0.0, self.held(rank) + 1 - self.limit)
        if self.table[F][rank] + over * self.table[W][rank] <= wait:
            return True
        return wait > self.slack(rank)

    def place(self, rank: int, kind: int) -> None:
        """Run an action, and before it the W that fit into its waiting time."""
        arrives = self.arrival(rank, kind) or 0
        each = self.table[W][rank]
        while self.has_weights(rank) and self.clock[rank] + each <= arrives:
            self.put(rank, W)
        wait = arrives - self.clock[rank]
        if self.has_weights(rank) and wait > 0 and (self.choices.fill or wait > self.slack(rank)):
            self.put(rank, W)
        self.put(rank, kind)

    def put(self, rank: int, kind: int) -> None:
        microbatch = self.count[kind][rank]
        start = max(self.clock[rank], self.arrival(rank, kind) or 0)
        if self.orders[rank]:
            self.bubble[rank] += start - self.clock[rank]
        else:
            self.begin[rank] = start
        self.clock[rank] = start + self.table[kind][rank]
        self.sent[kind][rank].append(self.clock[rank])
        self.count[kind][rank] += 1
        self.orders[rank].append(Action(rank, KINDS[kind], microbatch))

    def arrival(self, rank: int, kind: int) -> int | None:
        """Return the arrival of the message for a rank's next action; None if not sent yet."""
        source = {F: rank - 1, I: rank + 1}.get(kind, -1)
        if not 0 <= source < len(self.clock):
            return 0
        ends, microbatch = self.sent[kind][source], self.count[kind][rank]
        if microbatch >= len(ends):
            return None
        return ends[microbatch] + self.lag[source][rank]

    def held(self, rank: int) -> float:
        """Return the number of stage inputs that a rank holds."""
        forward, inputs, weights = (self.count[kind][rank] for kind in (F, I, W))
        return forward - inputs + self.weight_memory * (inputs - weights)

    def has_weights(self, rank: int) -> bool:
        return self.count[W][rank] < self.count[I][rank]

    def slack(self, rank: int) -> int:
        """Return the time that a rank can still wait before it is the rank that waits longest."""
        return max(self.bubble) - self.bubble[rank]

    def length(self) -> tuple[float, float]:
        """Return the longest span of a rank and the makespan, by which plans are compared.

        A rank's span is the time from its first action to its last. Durations may have been rounded
        to 12 digits, so both results are rounded to 9: then equal lengths compare equal.
        """
        spans = (end - begin for begin, end in zip(self.begin, self.clock, strict=True))
        return float(f"{max(spans):.9g}"), float(f"{max(self.clock):.9g}")

    def schedule(self, name: str) -> Schedule:
        num_ranks = len(self.orders)
        placement = loop_placement(num_ranks, num_ranks)
        return Schedule(name, self.num_microbatches, tuple(map(tuple, self.orders)), placement)
