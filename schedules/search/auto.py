"""The best timetable for given costs, memory limit and clock, and why other timetables lost.

The candidates are all families, the eight variants of `schedules.families.zero_bubble.zb_auto`,
list schedules by priority (`schedules.search.greedy`), and local improvements of the best of them
(`schedules.search.improve`). If a whole backward has its own duration (`Costs.b`), each timetable
is also tried with its halves merged (`schedules.search.merge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from schedules.clocks.report import Report
from schedules.clocks.simulate import check_arguments
from schedules.clocks.ticks import check_pattern
from schedules.core.action import ScheduleError, shorten
from schedules.core.arguments import integer, is_one_of, renamed
from schedules.core.check import check
from schedules.core.costs import Costs, of_unit_length_by_default
from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import check_sizes, need_memory
from schedules.search.contest import Find, Setting, known, search

CLOCKS = ("event", "lockstep")
BUDGET = 2000  # default number of timetables that local improvement times, if they are small
_WORK = 2_000_000  # default number of actions that it times, if timetables are large


@dataclass(frozen=True)
class Candidate:
    """One timetable that `auto` compares.

    Attributes:
      name: a family, or the search step that made the timetable.
      schedule: the timetable; None if the family has none of these sizes.
      makespan: the timetable's time under the clock; infinite without a timetable.
      peak: the most stage inputs that a rank holds; 0 without a timetable.
      lost: the reason why the candidate is not the winner; empty for the winner.
    """

    name: str
    schedule: Schedule | None = field(repr=False)
    makespan: float
    peak: int
    lost: str


@dataclass(frozen=True)
class Choice:
    """The winner and all other candidates.

    Attributes:
      schedule: the winner.
      report: the winner's report.
      candidates: all candidates, the winner first, candidates that do not fit last.
    """

    schedule: Schedule
    report: Report
    candidates: tuple[Candidate, ...]

    @property
    def won(self) -> str:
        """The search step that made the winner."""
        return self.candidates[0].name

    def __str__(self) -> str:
        """Format a table with one line for each candidate."""
        rows = [("candidate", "makespan", "peak", "")]
        for candidate in self.candidates:
            there = candidate.schedule is not None
            times = (f"{candidate.makespan:.6g}", str(candidate.peak)) if there else ("", "")
            rows.append((candidate.name, *times, candidate.lost or "the winner"))
        name, time, peak = (max(len(row[column]) for row in rows) for column in range(3))
        return "\n".join(
            f"{row[0]:<{name}}  {row[1]:>{time}}  {row[2]:>{peak}}  {row[3]}".rstrip()
            for row in rows
        )


@renamed("memory_limit", "max_activations")
def auto(
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    *,
    costs: Costs | None = None,
    max_activations: float | None = None,
    clock: str = "event",
    pattern: str | None = None,
    partners: bool = False,
    delayed: bool | None = False,
    budget: int | None = None,
    seed: int = 0,
) -> Choice:
    """Find the timetable with the smallest makespan; among equals the one with the smallest peak.

    The result is never slower than a family that fits into memory nor, if `Costs.b` is given and
    there are not too many actions, than such a family with its halves merged. The same arguments
    give the same result.

    Args:
      num_ranks: S.
      num_microbatches: M.
      num_stages: K, a multiple of S; S by default.
      costs: durations; by default F = I = W = 1 and messages are free.
      max_activations: the number of stage inputs that a rank may hold at once, with the meaning of
        `check`; None for no limit.
      clock: "event" or "lockstep", the clocks of `simulate`.
      pattern: in lockstep, the slots of a tick, an option of `simulate`; None for the fastest
        pattern.
      partners: in lockstep, the option of `simulate`.
      delayed: in lockstep, the option of `simulate`; None for the faster choice.
      budget: the number of timetables that local improvement may time; by default 2000, or fewer
        for more than 1000 actions.
      seed: the seed of random choices.

    Raises:
      ScheduleError: sizes that no schedule has; a limit that no schedule can meet (the message
        names the smallest possible limit); costs for other sizes; an unknown clock, or slots for a
        clock without slots; or a budget or seed that is not an integer >= 0.
    """
    costs = of_unit_length_by_default(costs)
    if not is_one_of(clock, CLOCKS):
        raise ScheduleError(
            f"clock={shorten(clock)}: a timetable can be chosen for one of "
            f"{', '.join(map(repr, CLOCKS))}; give measured times as costs"
        )
    sizes = check_sizes(num_ranks, num_microbatches, num_stages)
    limit = math.inf if max_activations is None else max_activations
    need_memory(limit, sizes[0], sizes[2])
    check_arguments(clock, pattern, partners, delayed, None)
    if pattern is not None:
        check_pattern(pattern)
    setting = Setting(*sizes, costs, limit, clock, partners, delayed, pattern)
    if budget is None:
        budget = min(BUDGET, _WORK // (3 * setting.num_stages * setting.num_microbatches))
    budget, seed = _count("budget", budget), _count("seed", seed)
    entries = list(known(setting))
    fitting = [
        entry for entry in entries if isinstance(entry, Find) and entry.peak <= setting.limit
    ]
    fitting += search(setting, fitting, budget, seed)
    timed = [(find, setting.simulate(find.get())) for find in fitting]
    timed.sort(key=lambda pair: (_rounded(pair[1].makespan), pair[0].peak))
    best = timed[0][1]
    check(best.schedule, max_activations=setting.limit)
    candidates = [
        Candidate(find.name, report.schedule, report.makespan, find.peak, _lost(report, best))
        for find, report in timed
    ]
    candidates += _unfit(entries, setting.limit)
    return Choice(best.schedule, best, tuple(candidates))


def _count(argument: str, value: object) -> int:
    count = integer(value)
    if count is None or count < 0:
        raise ScheduleError(
            f"{argument}={shorten(value)}: must be an integer >= 0; leave it out for the usual"
        )
    return count


def _unfit(entries: Sequence[Find | tuple[str, str]], limit: float) -> Iterator[Candidate]:
    """List candidates that exceed the limit, then candidates that do not exist."""
    for entry in entries:
        if isinstance(entry, Find) and entry.peak > limit:
            lost = f"needs {entry.peak} stage inputs, the limit is {limit}"
            yield Candidate(entry.name, entry.get(), entry.makespan, entry.peak, lost)
    for entry in entries:
        if not isinstance(entry, Find):
            name, reason = entry
            yield Candidate(name, None, math.inf, 0, f"cannot be built: {reason}")


def _rounded(makespan: float) -> float:
    """Round to nine digits, so that rounding errors do not decide the winner."""
    return float(f"{makespan:.9g}")


def _lost(report: Report, best: Report) -> str:
    """Tell in one sentence why a timetable is not the best."""
    if report is best:
        return ""
    if report.schedule == best.schedule:
        return "the same timetable"
    if _rounded(report.makespan) == _rounded(best.makespan):
        peak, least = max(report.peak_activations), max(best.peak_activations)
        if peak == least:
            return "as fast and as small, but not as simple"
        return f"as fast, but holds {peak} stage inputs, not {least}"
    slower = f"{report.makespan / best.makespan - 1:.2%} slower" if best.makespan else "slower"
    parts = report.explain().parts
    causes = {cause: sum(part[cause] for part in parts) for cause in parts[0]}
    idle = sum(causes.values())
    cause = max(causes, key=causes.__getitem__)
    return f"{slower}: {causes[cause] / idle:.0%} of its idle time is {cause}" if idle else slower
