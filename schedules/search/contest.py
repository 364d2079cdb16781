"""The search of `schedules.auto`: every family, every policy, then local improvement.

`schedules.search.problem` explains the codes of actions.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from schedules.clocks.report import Report
from schedules.clocks.simulate import simulate
from schedules.core.action import ScheduleError
from schedules.core.costs import Costs
from schedules.core.flat import F, I
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement
from schedules.families import FAMILIES, GROUPED
from schedules.families.constructions.sizes import rounds
from schedules.families.zero_bubble.zb_auto import variants
from schedules.search.greedy import policies, run
from schedules.search.improve import improve
from schedules.search.merge import merge, merged_under
from schedules.search.problem import Orders, Problem, peak, pose
from schedules.search.timing import Timer, timers

_KEPT = 3  # the number of timetables of the policies to show, and of timetables to improve
_LARGE = 2000  # above this number of actions only the best few timetables are merged


@dataclass(frozen=True)
class Setting:
    """The sizes, costs, clock and limits of a search.

    Attributes:
      limit: the number of stage inputs that a rank may hold; infinity for no limit.
      pattern: the only allowed pattern in lockstep; None for any pattern.
    """

    num_ranks: int
    num_microbatches: int
    num_stages: int
    costs: Costs
    limit: float
    clock: str
    partners: bool = False
    delayed: bool | None = False
    pattern: str | None = None
    _timers: dict[tuple[int, ...], list[Timer]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def timers(self, placement: tuple[int, ...]) -> list[Timer]:
        """Return the timers for orders on a placement: in lockstep, one for each slot pattern."""
        if placement not in self._timers:
            sizes = self.num_ranks, self.num_microbatches
            problem = pose(placement, *sizes, self.costs, self.limit)
            self._timers[placement] = timers(
                problem, self.clock, self.pattern, partners=self.partners, delayed=self.delayed
            )
        return self._timers[placement]

    def simulate(self, schedule: Schedule) -> Report:
        slots: dict[str, Any] = {n: getattr(self, n) for n in ("pattern", "partners", "delayed")}
        return simulate(schedule, self.costs, self.clock, **slots)

    def placements(self) -> list[tuple[int, ...]]:
        """List the placements to try: a loop and, with V > 1, a V, which reverses on odd chunks."""
        num_ranks = self.num_ranks
        loop = loop_placement(self.num_stages, num_ranks)
        back = tuple(
            r if chunk % 2 == 0 else num_ranks - 1 - r
            for chunk, r in ((k // num_ranks, k % num_ranks) for k in range(self.num_stages))
        )
        return [loop] if back == loop else [loop, back]


@dataclass(frozen=True, eq=False)
class Find:
    """A timetable that was found.

    Attributes:
      schedule: the timetable; None until the timetable is built from its orders.
      orders: [S] codes.
      timer: the timer that gives the makespan, if the timetable has no overlapped pairs.
    """

    name: str
    schedule: Schedule | None
    makespan: float
    orders: Orders
    timer: Timer

    @functools.cached_property
    def peak(self) -> int:
        """The most stage inputs that a rank holds."""
        return max(peak(self.timer.problem, order) for order in self.orders)

    def get(self) -> Schedule:
        return self.schedule or self.timer.problem.decode(self.name, self.orders)


def judge(setting: Setting, name: str, schedule: Schedule) -> Find:
    choices = setting.timers(schedule.placement)
    orders = choices[0].problem.encode(schedule)
    timed = [(timer(orders)[0], index) for index, timer in enumerate(choices)]
    makespan, index = min(timed)
    if schedule.pairs:  # the timers do not overlap pairs
        makespan = setting.simulate(schedule).makespan
    return Find(name, schedule, makespan, orders, choices[index])


def known(setting: Setting) -> Iterator[Find | tuple[str, str]]:
    """Build every family and every variant of zb_auto; yield a name and a reason if that fails.

    If B has its own duration, each timetable is also built with merged backwards.
    """
    entries: list[Find] = []
    for entry in _published(setting):
        yield entry
        if isinstance(entry, Find):
            entries.append(entry)
    small = 3 * setting.num_stages * setting.num_microbatches <= _LARGE
    yield from hybrids(setting, entries if small else _best(entries))


def hybrids(setting: Setting, finds: Iterable[Find]) -> Iterator[Find]:
    """Merge halves of timetables if that loses no time; yield none if B takes as long as I + W."""
    if setting.costs.b is None:
        return
    for find in finds:
        schedule = find.get()
        trials = [merge(schedule, setting.costs)]
        if setting.clock == "lockstep":
            orders = merged_under(find.timer, find.orders)
            trials.append(find.timer.problem.decode(trials[0].name, orders))
        changed = [trial for trial in trials if trial.orders != schedule.orders]
        judged = [judge(setting, trial.name, trial) for trial in changed]
        if judged:
            yield min(judged, key=lambda find: find.makespan)


def _published(setting: Setting) -> Iterator[Find | tuple[str, str]]:
    sizes = setting.num_ranks, setting.num_microbatches, setting.num_stages
    for name, family in FAMILIES.items():
        try:
            schedule = family(*sizes)
        except ScheduleError as error:
            yield name, str(error).partition(";")[0]
            fits = False
        else:
            find = judge(setting, name, schedule)
            yield find
            fits = find.peak <= setting.limit
        if name in GROUPED and not fits:
            yield from _grouped(setting, name)
    if setting.num_stages == setting.num_ranks:
        tried = variants(*sizes, costs=setting.costs, max_activations=setting.limit)
        for name, schedule in tried.items():
            yield judge(setting, name, schedule)


def _grouped(setting: Setting, name: str) -> Iterator[Find]:
    """Build a family with the largest rounds that fit into memory; large rounds idle least."""
    S, M, K = setting.num_ranks, setting.num_microbatches, setting.num_stages
    for group in range(S, (S - 1) // 2, -1):
        if (K // S - 1) * max(rounds(name, S, M, group)) + S <= setting.limit:
            schedule = GROUPED[name](S, M, K, group=group)
            yield judge(setting, schedule.name, schedule)
            return


def search(setting: Setting, finds: Iterable[Find], budget: int, seed: int) -> list[Find]:
    """Find further timetables: the best of the policies, and their improvements.

    The search starts from timetables within the limit, and improvement times at most ``budget``.
    ``seed`` starts its random choices.
    """
    finds = list(finds)
    built: list[Find] = []
    for placement in setting.placements():
        least = min((find.makespan for find in finds + built), default=math.inf)
        built = _best(built + list(_greedy(setting, placement, least)))
    built += hybrids(setting, _best(built))
    rng = random.Random(seed)  # noqa: S311  not for secrets
    return built + list(_improved(_best(finds + built), budget, rng))


def _best(finds: Iterable[Find]) -> list[Find]:
    """Return the few fastest timetables that differ."""
    best: list[Find] = []
    for find in sorted(finds, key=lambda find: find.makespan):
        if len(best) == _KEPT:
            break
        if all(find.orders != other.orders for other in best):
            best.append(find)
    return best


def _greedy(setting: Setting, placement: tuple[int, ...], least: float) -> Iterator[Find]:
    """Build timetables by the greedy policies, until one is as short as the lower bound."""
    shape = "" if len(setting.placements()) == 1 else "loop, "
    if placement != setting.placements()[0]:
        shape = "V, "
    for timer in setting.timers(placement):
        floor = _floor(timer)
        slots = "" if timer.pattern is None else f"{timer.pattern} slots, "
        slots += "delayed, " * timer.delayed
        for words, policy in policies(timer):
            if least <= floor:
                return
            orders = run(timer, policy)
            makespan = timer(orders)[0]
            least = min(least, makespan)
            name = f"list({shape}{slots}{words})"
            yield Find(name, None, makespan, orders, timer)


def _improved(starts: list[Find], budget: int, rng: random.Random) -> Iterator[Find]:
    """Search the neighbourhood of each start for a better timetable."""
    for find in starts:
        timer, part = find.timer, budget // len(starts)
        if find.makespan <= _floor(timer):
            continue
        makespan, orders = improve(timer, find.orders, budget=part, floor=_floor(timer), rng=rng)
        if makespan < find.makespan:
            yield Find(f"{find.name}, improved", None, makespan, orders, timer)


def _floor(timer: Timer) -> float:
    return shortest(timer.problem) * (1 + 1e-12)


def shortest(problem: Problem) -> float:
    """Compute a lower bound of a problem's makespan under any clock, which may be unreachable.

    It is the largest of these bounds. A rank starts after the first microbatch has reached it, and
    after its last I or B a gradient has to reach stage 0. One microbatch has to pass all stages and
    return. A microbatch is held until its gradient arrives, and a rank holds no more than the limit
    at once. If either B or I and W may run, the shorter counts.
    """
    num_stages, last = problem.num_stages, problem.num_stages - 1
    each, durations, lag = problem.num_microbatches, problem.durations, problem.lag
    code = [[problem.code(kind, stage, 0) for stage in range(num_stages)] for kind in range(4)]
    forward, whole, inputs, weights = ([durations[c] for c in row] for row in code)
    there, back = ([lag[c] for c in code[kind]] for kind in (F, I))
    both = [min(b, i + w) for b, i, w in zip(whole, inputs, weights, strict=True)]
    gradient = [min(b, i) for b, i in zip(whole, inputs, strict=True)]  # until it can be sent
    head, tail = [0.0], [both[0]]  # before a stage's first F, and from the start of its last I or B
    for k in range(last):
        head.append(head[-1] + forward[k] + there[k])
        after = back[k + 1] + tail[-1]
        halves = inputs[k + 1] + max(weights[k + 1], after)
        tail.append(min(halves, whole[k + 1] + after))
    waits = [0.0] * num_stages  # until a stage gets a microbatch's gradient, if nothing else runs
    waits[last] = forward[last]
    for k in reversed(range(last)):
        waits[k] = forward[k] + there[k] + waits[k + 1] + gradient[k + 1] + back[k + 1]
    bounds = [head[last] + waits[last] + tail[last]]
    for stages in problem.stages_of:
        start = min(head[k] for k in stages)
        passes = each * sum(forward[k] + gradient[k] for k in stages)
        storage = each * sum(waits[k] + both[k] for k in stages) / problem.limit
        bounds += [
            start + each * sum(forward[k] + both[k] for k in stages),
            start + passes + min(tail[k] - gradient[k] for k in stages),
            start + storage,
        ]
    return max(bounds)
