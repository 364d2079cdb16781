"""A timetable by priorities: a free rank runs the most urgent action that can start.

Under the event clock, time advances from the end of one action to the next. In lockstep it advances
from slot to slot, and an action may be passed over because all other ranks would wait for it. C is
the number of codes of actions (`schedules.search.problem`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schedules.core.flat import B, F, I, W
from schedules.search.problem import Problem
from schedules.search.timing import Timer


@dataclass(frozen=True, eq=False)
class Policy:
    """Preferences between actions that can start.

    Attributes:
      urgency: [C] the order of preference; the smallest runs first.
      ahead: [S] the number of F by which a rank may be ahead of its I or B, at least V.
      whole: [K * M] whether a backward is one B, at stage * M + microbatch. If a W of the stage has
        yet to run, the backward is I and W in any case.
      patience: a rank waits for a coming message, in place of a W, for up to this share of the W's
        time.
      even: in lockstep, whether to skip actions that make a slot too long for the work in it.
      quorum: in lockstep, the smallest number of ranks that run W in a slot with only W.
    """

    urgency: Sequence[float]
    ahead: Sequence[float]
    whole: Sequence[bool]
    patience: float = 0.0
    even: bool = False
    quorum: int = 0


class Board:
    """Actions that have run, and actions that can start.

    Attributes:
      forward: [K] the number of F that have run.
      back: [K] the number of I or B that have run.
      weights: [K] the number of W or B that have run.
      held: [S] the number of stage inputs held.
      flying: [S] the number of F whose backward has not run.
      there: [C] the arrival times of messages; -1 for a message that is not sent yet.
    """

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.forward, self.back, self.weights = ([0] * problem.num_stages for _ in range(3))
        self.held, self.flying = [0] * problem.num_ranks, [0] * problem.num_ranks
        self.there = [-1.0] * len(problem.awaited)
        self.orders: list[list[int]] = [[] for _ in range(problem.num_ranks)]
        self._size = problem.num_stages * problem.num_microbatches

    def messages(self, rank: int) -> list[tuple[float, int]]:
        """Return (arrival, code) of the next F and backward actions whose messages have been sent.

        A rank needs room for an F. An F of a later microbatch must leave room for the oldest
        microbatch that has not passed all stages of the rank. Otherwise ranks with V > 1 become
        full of microbatches that cannot reach the last stage.
        """
        problem, forward, back, there = self.problem, self.forward, self.back, self.there
        each, awaited, stages = problem.num_microbatches, problem.awaited, problem.stages_of[rank]
        most = min(problem.limit, self.policy.ahead[rank])
        room = self.held[rank] < problem.limit and self.flying[rank] < most
        spare = most - len(stages)
        if room and len(stages) > 1:
            oldest = min([forward[k] for k in stages])
            spare -= sum([forward[k] - oldest - 1 for k in stages if forward[k] > oldest])
        else:
            oldest = forward[stages[0]]
        codes = []
        for k in stages:
            m = forward[k]
            if room and m < each and (m == oldest or spare >= 1):
                codes.append(k * each + m)
            m = back[k]
            if m < forward[k]:
                item = k * each + m  # a B may not run before an earlier W
                kind = B if self.policy.whole[item] and self.weights[k] == m else I
                codes.append(kind * self._size + item)
        arrivals = [there[awaited[code]] if awaited[code] >= 0 else 0.0 for code in codes]
        return [(time, code) for time, code in zip(arrivals, codes, strict=True) if time >= 0.0]

    def accumulations(self, rank: int) -> list[int]:
        """Return the codes of the next W of every stage."""
        each, first = self.problem.num_microbatches, W * self._size
        return [
            first + k * each + self.weights[k]
            for k in self.problem.stages_of[rank]
            if self.weights[k] < self.back[k]
        ]

    def put(self, rank: int, code: int, arrival: float) -> None:
        """Run an action; its message arrives at the given time."""
        kind, item = divmod(code, self._size)
        stage = item // self.problem.num_microbatches
        self.orders[rank].append(code)
        if kind == F:
            self.forward[stage] += 1
            self.held[rank] += 1
            self.flying[rank] += 1
        else:
            if kind != W:
                self.back[stage] += 1
                self.flying[rank] -= 1
            if kind != I:
                self.weights[stage] += 1
                self.held[rank] -= 1
        message = self.problem.sent[code]
        if message >= 0:
            self.there[message] = arrival


def run(timer: Timer, policy: Policy) -> list[list[int]]:
    """Make [S] orders in which ranks run their most urgent action as early as the timer allows."""
    board = Board(timer.problem, policy)
    if timer.pattern is None:
        _by_event(board)
    else:
        _by_slot(board, timer.waits, delayed=timer.delayed)
    return board.orders


def _by_event(board: Board) -> None:
    problem, policy = board.problem, board.policy
    durations, urgency = problem.durations, policy.urgency
    busy = [0.0] * problem.num_ranks
    queue = [(0.0, rank) for rank in range(problem.num_ranks)]
    while queue:
        now, rank = heapq.heappop(queue)
        if busy[rank] > now:
            continue
        sent = board.messages(rank)
        ready = [code for time, code in sent if time <= now]
        soon = min((time for time, _ in sent if time > now), default=math.inf)
        code = min(ready, key=urgency.__getitem__, default=-1)
        weights = min(board.accumulations(rank), key=urgency.__getitem__, default=-1)
        if (
            weights >= 0
            and soon - now >= policy.patience * durations[weights]
            and (code < 0 or urgency[weights] < urgency[code])
        ):
            code = weights
        if code < 0:
            if soon < math.inf:
                heapq.heappush(queue, (soon, rank))
            continue
        end = now + durations[code]
        arrival = end + problem.lag[code]
        board.put(rank, code, arrival)
        busy[rank] = end
        heapq.heappush(queue, (end, rank))
        if problem.sent[code] >= 0:
            heapq.heappush(queue, (arrival, problem.reader[code]))


def _by_slot(board: Board, waits: Sequence[Sequence[int]], *, delayed: bool) -> None:
    problem, policy = board.problem, board.policy
    first_weights = W * problem.num_stages * problem.num_microbatches
    width, slot, idle = len(waits), 0, 0
    # One idle round may lack a quorum for W; after a second, and a late message's slot, no action
    # is left.
    while idle <= 2 * width + delayed:
        wait = waits[slot % width]
        options = []
        for rank in range(problem.num_ranks):
            codes = [code for time, code in board.messages(rank) if time <= slot and not wait[code]]
            codes += [code for code in board.accumulations(rank) if not wait[code]]
            options.append(sorted(codes, key=policy.urgency.__getitem__))
        if policy.even:
            options = _even(problem, options)
        chosen = [(rank, codes[0]) for rank, codes in enumerate(options) if codes]
        only_weights = all(code >= first_weights for _, code in chosen)
        if only_weights and len(chosen) < policy.quorum and idle < width:
            chosen = []
        for rank, code in chosen:
            late = delayed and problem.reader[code] != rank
            board.put(rank, code, slot + 1 + late)
        idle = 0 if chosen else idle + 1
        slot += 1


def _even(problem: Problem, options: list[list[int]]) -> list[list[int]]:
    """Choose the slot duration with the highest utilisation, and drop longer actions."""
    durations = problem.durations
    levels = sorted({durations[code] for codes in options for code in codes}, reverse=True)

    def utilisation(level: float) -> float:
        work = 0.0
        for codes in options:
            work += next((durations[code] for code in codes if durations[code] <= level), 0.0)
        return work / level if level else 0.0

    best = max(levels, key=utilisation, default=0.0)
    return [[code for code in codes if durations[code] <= best] for codes in options]


def policies(timer: Timer) -> Iterator[tuple[str, Policy]]:
    """Yield names and policies for one placement and, in lockstep, one pattern.

    The most frequent winners come first (bench/notes/auto.md). The policies combine three choices:
    F or backward first; the oldest microbatch first or, with V > 1, groups that pass chunk after
    chunk; and the number of F by which a rank may be ahead (as many as in 1F1B, as in ZB-H2, or up
    to the memory limit).
    """
    problem = timer.problem
    several = len(problem.stages_of[0]) > 1
    typed = timer.pattern in ("paired", "unit")  # a slot holds one kind of action on all ranks
    for grouped, (depth, ahead), forward in itertools.product(
        (False, True) if several else (False,),
        _depths(problem)[typed:],
        (True,) if typed else (True, False),
    ):
        urgency = _urgency(problem, forward_first=forward, grouped=grouped)
        words = ["forward first" if forward else "backward first"]
        words += ["grouped"] * grouped + [depth] * bool(depth)
        for more, options in _options(timer):
            policy = Policy(urgency, ahead, **options)  # type: ignore[arg-type]
            yield ", ".join((*words, *more)), policy


def _options(timer: Timer) -> Iterator[tuple[list[str], dict[str, object]]]:
    """Yield the further options that a clock allows, with the words for a policy's name."""
    problem, pattern = timer.problem, timer.pattern
    size = problem.num_stages * problem.num_microbatches
    split, whole = [False] * size, [True] * size
    if pattern is None:
        for patience in (1.0, 0.5, 0.0):
            words = [f"patience {patience}"] if patience else []
            yield words, {"whole": split, "patience": patience}
        if problem.prices_halves:
            each, drain = problem.num_microbatches, problem.num_ranks
            early = [item % each < each - drain for item in range(size)]
            yield ["whole"], {"whole": whole}
            yield ["whole but for the drain"], {"whole": early, "patience": 0.5}
    elif pattern in ("single", "partner"):
        for even in (False, True):
            yield ["even"] * even, {"whole": split, "even": even}
            yield ["even"] * even + ["whole"], {"whole": whole, "even": even}
    else:
        for quorum in (problem.num_ranks, 0):
            yield ["W together"] * bool(quorum), {"whole": split, "quorum": quorum}
        yield ["whole"], {"whole": whole}


def _depths(problem: Problem) -> list[tuple[str, Sequence[float]]]:
    """List names and values of the choices for [S] how many F each rank may be ahead."""
    ranks = range(problem.num_ranks, 0, -1)
    before = (len(problem.stages_of[0]) - 1) * problem.num_ranks
    return [
        ("ahead as 1f1b", [before + left for left in ranks]),
        ("ahead as zb_h2", [before + 2 * left - 1 for left in ranks]),
        ("", [math.inf] * problem.num_ranks),
    ]


def _urgency(problem: Problem, *, forward_first: bool, grouped: bool) -> list[float]:
    """Compute [C] the urgency of each action; the smallest is the most urgent, and W is last."""
    num_stages, each = problem.num_stages, problem.num_microbatches
    chunks, size = len(problem.stages_of[0]), num_stages * each
    group = min(problem.num_ranks, each) if grouped else 1
    chunk_of = {k: chunk for stages in problem.stages_of for chunk, k in enumerate(stages)}
    forward: list[float] = []
    backward: list[float] = []
    for stage in range(num_stages):
        for m in range(each):
            turn, place = divmod(m, group)
            if grouped:
                there, back = chunk_of[stage], chunks - 1 - chunk_of[stage]
            else:  # of one microbatch, the action that has passed more stages
                there, back = num_stages - 1 - stage, stage
            steps = chunks if grouped else num_stages
            forward.append((turn * steps + there) * group + place)
            backward.append((turn * steps + back) * group + place)
    late = {F: 0 if forward_first else size, B: size if forward_first else 0}
    late[I] = late[B]
    rows = {F: forward, B: backward, I: backward}
    urgency = [late[kind] + value for kind in (F, B, I) for value in rows[kind]]
    return urgency + [2.0 * size + value for value in backward]
