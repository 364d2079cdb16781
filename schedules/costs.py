"""How long actions and messages take. The only place that turns an action into a duration.

Letters as in `schedules.ir`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedules.ir import Kind, ScheduleError, shorten

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit of time.

    Attributes:
      f: forward pass of one stage on one microbatch; one number, or [K] numbers, one per stage
        (the stages with the embedding and the head take longer).
      i: gradient for the input, likewise.
      w: gradient for the weights, likewise; a full backward ``B`` takes ``i + w``.
      comm: a message between two ranks; one number, or [S, S] numbers, ``comm[source][target]``.
        One that stays on its rank is free.
      optimizer: the synchronous optimiser step that every rank makes when all have ended.
      pair: an overlapped pair, F beside the backward of another stage; None if its halves run one
        after the other and so take the sum. In lockstep they always do.
    """

    f: float | Sequence[float] = 1.0
    i: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    comm: float | Sequence[Sequence[float]] = 0.0
    optimizer: float = 0.0
    pair: float | None = None

    def __post_init__(self) -> None:
        for name in ("f", "i", "w"):
            value = getattr(self, name)
            if _is_number(value):
                _see_that_it_is_a_duration(name, value, value)
            else:
                object.__setattr__(self, name, _tuple(name, value, value, "[K] numbers"))
        if _is_number(self.comm):
            _see_that_it_is_a_duration("comm", self.comm, self.comm)
        else:
            rows = _tuple("comm", self.comm, self.comm, "[S, S] numbers", each=Iterable)
            matrix = tuple(_tuple("comm", self.comm, row, "[S, S] numbers") for row in rows)
            if any(len(row) != len(rows) for row in matrix):
                raise ScheduleError(
                    f"Costs(comm={shorten(self.comm)}) has {len(rows)} rows of "
                    f"{sorted({len(row) for row in matrix})} numbers: comm[source][target] is a "
                    f"square of S rows; give that, or one number for all"
                )
            object.__setattr__(self, "comm", matrix)
        _see_that_it_is_a_duration("optimizer", self.optimizer, self.optimizer)
        if self.pair is not None:
            _see_that_it_is_a_duration("pair", self.pair, self.pair)

    def of(self, kind: Kind, stage: int) -> float:
        """Duration of one action."""
        if kind == "B":
            return self.of("I", stage) + self.of("W", stage)
        value = getattr(self, kind.lower())
        return float(value if _is_number(value) else value[stage])

    def table(self, num_stages: int) -> Times:
        """[4, K] duration of F, B, I and W (the order of `ir.KINDS`) of every stage.

        Raises:
          ScheduleError: one of them is given for another number of stages.
        """
        rows = []
        for name in ("f", "i", "w"):
            value = getattr(self, name)
            if not _is_number(value) and len(value) != num_stages:
                raise ScheduleError(
                    f"Costs({name}={shorten(value)}) has {len(value)} numbers for {num_stages} "
                    f"stages; give one for each stage, or one number for all"
                )
            rows.append(np.broadcast_to(np.asarray(value, np.float64), num_stages))
        f, i, w = rows
        return np.stack([f, i + w, i, w])

    def messages(self, num_ranks: int) -> Times:
        """[S, S] duration of a message from one rank to another, 0 where it stays.

        Raises:
          ScheduleError: comm is given for another number of ranks.
        """
        if not _is_number(self.comm) and len(self.comm) != num_ranks:  # type: ignore[arg-type]
            raise ScheduleError(
                f"Costs(comm={shorten(self.comm)}) is for "
                f"{len(self.comm)} ranks, the schedule has "  # type: ignore[arg-type]
                f"{num_ranks}; give comm[source][target] for each pair, or one number for all"
            )
        full = np.broadcast_to(np.asarray(self.comm, np.float64), (num_ranks, num_ranks))
        return np.where(np.eye(num_ranks, dtype=bool), 0.0, full)

    def lags(self, source: NDArray[np.int64], target: NDArray[np.int64], num_ranks: int) -> Times:
        """[A] how long messages take from rank to rank, each pair of ranks given by two arrays."""
        if _is_number(self.comm):  # without a table of all pairs, which may be huge
            return np.where(source == target, 0.0, float(self.comm))  # type: ignore[arg-type]
        return self.messages(num_ranks)[source, target]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _see_that_it_is_a_duration(name: str, given: object, value: object) -> None:
    if not (_is_number(value) and math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        within = "" if value is given else f" has {value!r}"
        raise ScheduleError(
            f"Costs({name}={shorten(given)}){within}: a duration is a finite number >= 0; "
            f"give the measured time, in the same unit for all"
        )


def _tuple(
    name: str, given: object, value: object, wanted: str, each: type | None = None
) -> tuple[float, ...]:
    """A sequence of durations (or of what ``each`` says) as a tuple."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        parts = tuple(value.tolist() if isinstance(value, np.ndarray) else value)
        if parts:
            for part in parts if each is None else ():
                _see_that_it_is_a_duration(name, given, part)
            return parts
    raise ScheduleError(
        f"Costs({name}={shorten(given)}): must be one number, or {wanted}; give the measured "
        f"time, in the same unit for all"
    )
