"""Seconds of actions, computed from the seconds of steps, and checks of the measurements.

Steps are timed with the first microbatch alone, with one kind of action of one stage added, and
with all actions of a rank added (`pipeline.insight.calibrate.measure`). The time of an action is a
difference of two of these measurements. Noise can spoil a difference, so each must be large
compared with its spread, and the differences must agree with each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[int, str]  # a stage and a kind of action
UNSURE = 0.2  # largest standard error of a median, as a share of the stage's longest action
LEAST = 0.05  # smallest F or B, as a share of the stage's longest action
HALVES = 0.6, 1.8  # smallest and largest I + W, as a share of B
SUM = 0.25  # largest difference of a turn and the sum of its actions, as a share of the turn


class CalibrationError(RuntimeError):
    """Measured times that contradict each other, or that are smaller than the noise."""


@dataclass(frozen=True)
class Timed:
    """Seconds of steps of one program on one rank; [R] numbers, one per round.

    Attributes:
      first: the times of steps in which only the first microbatch runs.
      turns: by the stages of a rank, the times of steps that add all actions of these stages to
        the first microbatch.
      of: by stage and kind, the times of steps that add the actions of one kind of one stage to the
        first microbatch.
      repeats: the number of microbatches after the first.
    """

    first: Sequence[float]
    turns: Mapping[tuple[int, ...], Sequence[float]]
    of: Mapping[Key, Sequence[float]]
    repeats: int

    def each(self, taken: Sequence[float]) -> list[float]:
        """Return [R] seconds per added microbatch; both steps of a difference are of one round."""
        return [(t - f) / self.repeats for t, f in zip(taken, self.first, strict=True)]

    def one_by_one(self, stages: Collection[int]) -> list[Took]:
        """Return the time that each action of some stages adds when it runs alone."""
        return [spread_of(self.each(taken)) for (k, _), taken in self.of.items() if k in stages]


class Took(NamedTuple):
    """Seconds of an action: the median over rounds, and the median distance from this median."""

    median: float
    spread: float


def spread_of(times: Sequence[float]) -> Took:
    """Return the median of times, and the median distance of the times from this median."""
    median = statistics.median(times)
    return Took(median, statistics.median(abs(t - median) for t in times))


def error_of_median(took: Took, count: int) -> float:
    """Return the standard error of a median of normal numbers, by their median deviation."""
    return 1.86 / math.sqrt(count) * took.spread


def conclude(
    timed: Sequence[Timed], names: Mapping[int, str], idle: Collection[Key] = ()
) -> dict[Key, Took]:
    """Compute the time of each action when a rank runs its actions in turn.

    The times of single actions give the ratios between actions. The turns of ranks give the scale:
    all times are multiplied by the sum of all turns, divided by the sum of the single actions.

    Args:
      timed: the times of a program with whole backwards, and perhaps of one with halves.
      idle: actions that compute nothing, so their times may be 0.

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
            f"the measured times contradict each other: {'; '.join(wrong)}; measure again on a "
            f"quiet machine, with more rounds= or repeats=, and if that does not help, report it "
            f"with these numbers"
        )
    in_turn: dict[Key, Took] = {}
    for one in timed:
        longer = _in_turn(one)
        for key in one.of:
            in_turn.setdefault(key, Took(longer * found[key].median, longer * found[key].spread))
    return in_turn


def slices_of(one: Timed, parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Compute [N] seconds that each slice of a microbatch takes, for ``Costs(slices=)``.

    Args:
      one: times of a program with slices; only the times of the first microbatch are read.
      parts: [N] times of steps that add one slice of the other microbatches to the first
        microbatch.

    Raises:
      CalibrationError: the times are noise.
    """
    found = {(n, "a microbatch"): spread_of(one.each(times)) for n, times in enumerate(parts)}
    longest = max(took.median for took in found.values())
    names = {n: f"slice {n}" for n in range(len(parts))}
    _check_noise(found, dict.fromkeys(names, longest), names, rounds=len(one.first))
    return tuple(max(0.0, took.median) for took in found.values())


def _in_turn(one: Timed) -> float:
    """Divide the time of a rank's whole sequence of actions by the sum of the times of the single
    actions.
    """
    turns = sum(spread_of(one.each(times)).median for times in one.turns.values())
    return turns / sum(part.median for held in one.turns for part in one.one_by_one(held))


def _check_noise(
    found: Mapping[Key, Took], longest: Mapping[int, float], names: Mapping[int, str], rounds: int
) -> None:
    """Check that times are large compared with their spread."""
    drowned = [
        f"{kind} of {names[k]} took {_ms(took.median)} with a spread of {_ms(took.spread)}"
        for (k, kind), took in found.items()
        if longest[k] <= 0 or error_of_median(took, rounds) > UNSURE * longest[k]
    ]
    if drowned:
        raise CalibrationError(
            f"cannot conclude from {rounds} rounds, because their times differ too much: "
            f"{'; '.join(drowned)}; calibrate on a quiet machine, with more rounds= or repeats=, "
            f"or with larger microbatches"
        )


def _halves_that_disagree(
    found: Mapping[Key, Took], longest: Mapping[int, float], names: Mapping[int, str]
) -> list[str]:
    """Describe the stages whose I and W take far more or far less than their B."""
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
    """Describe the ranks whose turn takes far more or far less than the sum of its actions."""
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
