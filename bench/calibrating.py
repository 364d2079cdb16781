"""Calibrations that are made in turns with what they predict, by processes of one core.

A machine gets slower and quicker by the minute: calibrated before or after the steps that they are
held against, stages are found up to 10% too cheap or too dear. Cores of one machine share its
memory and its clock rate, so that all can be kept busy with the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from bench.pinned import Elsewhere, cores
from pipeline import Calibration
from pipeline.insight.calibrate.measure import Calibrator
from pipeline.insight.forecast.bytes import MemoryPrediction, predict

Calibrators = Mapping[Any, Calibrator]


class Calibrating(ExitStack):
    """Calibrations of several things, a round of each in every turn; a context manager.

    Args:
      make: a module-level function, or a `functools.partial` of one: their calibrators, by name.
      busy: whether every other core does the same meanwhile, as in a step; what the first has
        found is told.
    """

    def __init__(self, make: Callable[[], Calibrators], *, busy: bool) -> None:
        super().__init__()
        several = functools.partial(_Several, make)
        self._all = [Elsewhere(several, core) for core in (cores() if busy else cores()[:1])]

    def __enter__(self) -> Self:
        super().__enter__()
        for one in self._all:
            self.enter_context(one)
        return self

    def turn(self) -> float:
        """A round of each; a `bench.measure.Timer`, whose seconds say nothing."""
        for one in self._all:
            one.begin("turn")
        for one in self._all:
            one.end()
        return 0.0

    def conclude(self, rounds: int) -> dict[Any, Calibration]:
        """Conclusions from the last rounds.

        Raises:
          CalibrationError: the times are noise, or they contradict each other.
        """
        found: dict[Any, Calibration] = self._all[0].call("conclude", rounds)
        return found

    def memory(self) -> dict[Any, MemoryPrediction]:
        """Predicted memory of the steps that give the overhead."""
        found: dict[Any, MemoryPrediction] = self._all[0].call("memory")
        return found


class _Several:
    def __init__(self, make: Callable[[], Calibrators]) -> None:
        self._each = dict(make())

    def turn(self) -> None:
        for one in self._each.values():
            one.turn()

    def conclude(self, rounds: int) -> dict[Any, Calibration]:
        return {name: one.conclude(rounds) for name, one in self._each.items()}

    def memory(self) -> dict[Any, MemoryPrediction]:
        return {name: predict(*one.operands) for name, one in self._each.items()}
