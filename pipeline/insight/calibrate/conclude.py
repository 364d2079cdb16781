"""The inference of actions' seconds from steps' seconds, or of the steps' faults.

A step is timed with next to nothing, with one kind of action of one stage, and with all that a rank
does (`pipeline.insight.calibrate.measure`). What an action takes is a difference, and differences
of noisy numbers may be anything: so numbers must stand out of their spread and agree with each
other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[int, str]  # a stage and a kind of action
UNSURE = 0.2  # how far off a median may be, in what a stage's longest action takes
LEAST = 0.05  # of the longest action of its stage that F or B of a stage takes
HALVES = 0.6, 1.8  # I + W, in B
SUM = 0.25  # by how much the actions of a rank may differ from what they take in turn


class CalibrationError(RuntimeError):
    """Measured times that contradict each other, or that noise has drowned."""


@dataclass(frozen=True)
class Timed:
    """Seconds of steps of one program on one rank, [R] round by round.

    Attributes:
      first: of a step in which only the first microbatch runs.
      turns: of steps in which beside the first microbatch all actions of some stages run, those
        that a rank holds.
      of: of one in which beside the first microbatch one kind of action of one stage runs.
      repeats: microbatches but the first.
    """

    first: Sequence[float]
    turns: Mapping[tuple[int, ...], Sequence[float]]
    of: Mapping[Key, Sequence[float]]
    repeats: int

    def each(self, taken: Sequence[float]) -> list[float]:
        """[R] seconds that a microbatch adds; a round's runs are near each other in time."""
        return [(t - f) / self.repeats for t, f in zip(taken, self.first, strict=True)]

    def one_by_one(self, stages: Collection[int]) -> list[Took]:
        """Time that each action of some stages adds when it runs alone."""
        return [spread_of(self.each(taken)) for (k, _), taken in self.of.items() if k in stages]


class Took(NamedTuple):
    """Seconds of an action: the median over rounds, and the median distance from it."""

    median: float
    spread: float


def spread_of(times: Sequence[float]) -> Took:
    """Return the median of times, and their median distance from it."""
    median = statistics.median(times)
    return Took(median, statistics.median(abs(t - median) for t in times))


def conclude(
    timed: Sequence[Timed], names: Mapping[int, str], idle: Collection[Key] = ()
) -> dict[Key, Took]:
    """Time that each action takes when a rank runs one after the other.

    One by one they say how they compare. How long they take says a rank's turn: all are longer by
    as much as those of all ranks are together.

    Args:
      timed: of a program with whole backwards, and perhaps of one with halves.
      names: what messages call the stages.
      idle: actions that compute nothing, and so may take nothing.

    Raises:
      CalibrationError: the times are noise, or they contradict each other.
    """
    found: dict[Key, Took] = {}
    for one in timed:
        for key, taken in one.of.items():
            found.setdefault(key, spread_of(one.each(taken)))
    longest = {k: max(t.median for (j, _), t in found.items() if j == k) for k, _ in found}
    _check_noise(found, longest, names, rounds=len(timed[0].first))
    wrong = [
        f"{kind} of {names[k]} takes {_ms(took.median)}, and another of its actions "
        f"{_ms(longest[k])}: what it computes was not run"
        for (k, kind), took in found.items()
        if kind in "FB" and (k, kind) not in idle and took.median < LEAST * longest[k]
    ]
    wrong += _halves_that_disagree(found, longest, names)
    for one in timed:
        wrong += _sums_that_disagree(one, names)
    if wrong:
        raise CalibrationError(
            f"what was measured contradicts itself: {'; '.join(wrong)}; measure again on a quiet "
            f"machine, with more rounds= or repeats=, and if it stays report it with these numbers"
        )
    in_turn: dict[Key, Took] = {}
    for one in timed:
        longer = _in_turn(one)
        for key in one.of:
            in_turn.setdefault(key, Took(longer * found[key].median, longer * found[key].spread))
    return in_turn


def slices_of(one: Timed, parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Compute [N] seconds of all actions of one slice, for ``Costs(slices=)``.

    Args:
      one: of a program of slices, with its first microbatch alone.
      parts: [N] of steps in which beside the first microbatch one slice of the others runs.

    Raises:
      CalibrationError: the times are noise.
    """
    found = {(n, "a microbatch"): spread_of(one.each(times)) for n, times in enumerate(parts)}
    longest = max(took.median for took in found.values())
    names = {n: f"slice {n}" for n in range(len(parts))}
    _check_noise(found, dict.fromkeys(names, longest), names, rounds=len(one.first))
    return tuple(max(0.0, took.median) for took in found.values())


def _in_turn(one: Timed) -> float:
    """Ratio of the time of a rank's actions in turn to their time one by one."""
    turns = sum(spread_of(one.each(times)).median for times in one.turns.values())
    return turns / sum(part.median for held in one.turns for part in one.one_by_one(held))


def _check_noise(
    found: Mapping[Key, Took], longest: Mapping[int, float], names: Mapping[int, str], rounds: int
) -> None:
    """Check that times are large compared with their spread.

    Raises:
      CalibrationError: they do not.
    """
    # The standard error of a median of normal numbers whose median distance from it is 1.
    error = 1.86 / math.sqrt(rounds)
    drowned = [
        f"{kind} of {names[k]} took {_ms(took.median)} with a spread of {_ms(took.spread)}"
        for (k, kind), took in found.items()
        if longest[k] <= 0 or error * took.spread > UNSURE * longest[k]
    ]
    if drowned:
        raise CalibrationError(
            f"cannot conclude from {rounds} rounds, for too far apart are they: "
            f"{'; '.join(drowned)}; calibrate on a quiet machine, with more rounds= or repeats=, "
            f"or with larger microbatches"
        )


def _halves_that_disagree(
    found: Mapping[Key, Took], longest: Mapping[int, float], names: Mapping[int, str]
) -> list[str]:
    """Stages whose I and W take far more or far less than their B."""
    wrong = []
    for k, name in names.items():
        if not all((k, kind) in found for kind in "BIW"):
            continue
        b, i, w = (found[k, kind] for kind in "BIW")
        slack = 2 * (b.spread + i.spread + w.spread) + LEAST * longest[k]
        least, most = (share * b.median for share in HALVES)
        if not least - slack <= i.median + w.median <= most + slack:
            wrong.append(
                f"I and W of {name} take {_ms(i.median)} and {_ms(w.median)}, and its B "
                f"{_ms(b.median)}, which does the work of both"
            )
    return wrong


def _sums_that_disagree(one: Timed, names: Mapping[int, str]) -> list[str]:
    """Turns of a rank that its actions do not make up."""
    wrong, kinds = [], ", ".join(dict.fromkeys(kind for _, kind in one.of))
    for stages, times in one.turns.items():
        turn, parts = spread_of(one.each(times)), one.one_by_one(stages)
        total = sum(part.median for part in parts)
        slack = 2 * (turn.spread + sum(part.spread for part in parts))
        if abs(total - turn.median) > SUM * turn.median + slack:
            wrong.append(
                f"one microbatch's {kinds} of {', '.join(names[k] for k in stages)} take "
                f"{_ms(total)} one by one, and {_ms(turn.median)} in turn"
            )
    return wrong


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
