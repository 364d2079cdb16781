"""Durations of actions and messages. The only place that turns an action into a duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedules.core.action import KINDS, ScheduleError, shorten
from schedules.core.arguments import LONGEST, check_duration, integer, is_number, need

Times = NDArray[np.float64]
COPIES = ("beside a write of F", "beside a copy of another action")


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit of time.

    Attributes:
      f: forward pass of one stage on one microbatch; one number, or [K] numbers, one per stage
        (the stages with the embedding and the head take longer).
      i: gradient for the input, in the same form.
      w: gradient for the weights, in the same form.
      b: a whole backward, in the same form, by keyword only; None for ``i + w``. I writes values
        that W reads, so B is usually cheaper than I + W, and much cheaper if B recomputes the
        forward.
      comm: a message between two ranks; one number, or [S, S] numbers, ``comm[source][target]``. A
        message that stays on its rank is free.
      optimizer: the synchronous optimiser step that every rank runs after all ranks have ended.
      head: the head and the loss of one microbatch, forward and backward. The last stage's B or I
        takes this time longer; if all ranks share the head, every rank takes 1/S of it.
      embed: the lookup of one microbatch on the first stage's F, and the same time for its gradient
        on B or I; if all ranks share the embedding, every rank takes 1/S of it.
      pair: an overlapped pair of F and the backward of another stage; None if its halves run one
        after the other and take the sum of their times. In lockstep, and if ranks share work, they
        always take the sum.
      slices: [N] numbers, by keyword only, for schedules that cut microbatches into N slices: the
        relative durations of the slices, such as (1, 3, 5) if later slices read more keys; None for
        equal shares. All other durations are for whole microbatches, and a slice takes its share. A
        message of a slice takes 1/N of ``comm``.
      host: the copy of a stage's stash over the host link, one way, by keyword only; one number, or
        [K]. It counts if ``offload=`` moves stashes; with "crossings" it is the copy of the values
        that I keeps for W.
      host_overlap: the share of an action's time that its copy can overlap, from 0 to 1, by keyword
        only. With 1 (asynchronous copies) an action with a copy takes the longer of the two times;
        with 0 their sum. Two numbers are the share for F and its write, and the share for other
        actions and their copies.
    """

    f: float | Sequence[float] = 1.0
    i: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    b: float | Sequence[float] | None = field(default=None, kw_only=True)
    comm: float | Sequence[Sequence[float]] = 0.0
    optimizer: float = 0.0
    pair: float | None = None
    head: float = 0.0
    embed: float = 0.0
    slices: Sequence[float] | None = field(default=None, kw_only=True)
    host: float | Sequence[float] = field(default=0.0, kw_only=True)
    host_overlap: float | Sequence[float] = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("f", "i", "w", "b", "host"):
            value = getattr(self, name)
            if name == "b" and value is None:
                continue
            if is_number(value):
                self._set(name, value)
            else:
                object.__setattr__(self, name, _tuple(name, value, value, "[K] numbers"))
        if is_number(self.comm):
            self._set("comm", self.comm)
        else:
            rows = _tuple("comm", self.comm, self.comm, "[S, S] numbers", each=Sequence)
            matrix = tuple(_tuple("comm", self.comm, row, "[S, S] numbers") for row in rows)
            if any(len(row) != len(rows) for row in matrix):
                raise ScheduleError(
                    f"Costs(comm={shorten(self.comm)}) has {len(rows)} rows of "
                    f"{sorted({len(row) for row in matrix})} numbers: comm[source][target] is a "
                    f"square of S rows; give that, or one number for all"
                )
            object.__setattr__(self, "comm", matrix)
        for name in ("optimizer", "head", "embed"):
            self._set(name, getattr(self, name))
        if self.pair is not None:
            self._set("pair", self.pair)
        if self.slices is not None:
            parts = _tuple("slices", self.slices, self.slices, "[N] numbers")
            if not sum(parts) > 0:
                raise ScheduleError(
                    f"Costs(slices={shorten(self.slices)}): some slice must take time; give what "
                    f"the slices take in relation to each other"
                )
            object.__setattr__(self, "slices", parts)
        object.__setattr__(self, "host_overlap", _overlap(self.host_overlap))

    def _set(self, name: str, value: object) -> None:
        _check_lasts(name, value, value)
        object.__setattr__(self, name, _plain(value))

    def table(self, num_stages: int, shared: Sequence[str] = ()) -> Times:
        """Return [4, K] durations of F, B, I and W (the order of `KINDS`) for every stage.

        The first stage runs embed and the last stage head, unless all ranks share them.

        Raises:
          ScheduleError: a duration is given for another number of stages.
        """
        names = ("f", "i", "w") + ("b",) * (self.b is not None)
        rows = {name: self._row(name, num_stages) for name in names}
        whole = rows.get("b", rows["i"] + rows["w"])
        table = np.stack([rows["f"], whole, rows["i"], rows["w"]])
        if "embed" not in shared:
            table[:3, 0] += self.embed
        if "head" not in shared:
            table[1:3, -1] += self.head
        return table

    def _row(self, name: str, num_stages: int) -> Times:
        value = getattr(self, name)
        if not is_number(value) and len(value) != num_stages:
            raise ScheduleError(
                f"Costs({name}={shorten(value)}) has {len(value)} numbers for {num_stages} "
                f"stages; give one for each stage, or one number for all"
            )
        return np.broadcast_to(np.asarray(value, np.float64), num_stages)

    def shares(self, num_slices: int) -> Times:
        """Compute [N] shares of a microbatch's time, one for each slice.

        Raises:
          ScheduleError: `slices` is given for another number of slices.
        """
        if self.slices is None or num_slices == 1:
            return np.full(num_slices, 1 / num_slices)
        if len(self.slices) != num_slices:
            raise ScheduleError(
                f"Costs(slices={shorten(self.slices)}) has {len(self.slices)} numbers for "
                f"{num_slices} slices; give one for each slice, or None for equal ones"
            )
        parts = np.asarray(self.slices, np.float64)
        return parts / parts.sum()

    def durations(
        self,
        kind: NDArray[np.int64],
        stage: NDArray[np.int64],
        unit: NDArray[np.int64],
        sizes: tuple[int, int],
        shared: Sequence[str] = (),
        copies: NDArray[np.bool_] | None = None,
    ) -> Times:
        """Compute [A] durations of actions.

        Args:
          kind: [A] the kind of each action, a position in `KINDS`.
          stage: [A] the stage of each action.
          unit: [A] the unit of each action, ``microbatch * N + slice``.
          sizes: K and N.
          shared: the ends of the model that all ranks share.
          copies: [A] whether an action copies a value over the host link; None for none.
        """
        num_stages, num_slices = sizes
        lengths = self.table(num_stages, shared)[kind, stage]
        if num_slices > 1:
            lengths = lengths * self.shares(num_slices)[unit % num_slices]
        if copies is None:
            return lengths
        link: Times = self._row("host", num_stages)[stage] / num_slices
        copy = np.where(copies, link, 0.0)
        write, read = self.overlaps
        hides = np.where(kind == KINDS.index("F"), write, read) * lengths
        return lengths + copy - np.minimum(copy, hides)

    @property
    def overlaps(self) -> tuple[float, float]:
        """The shares of `host_overlap` for F, and for other actions."""
        if isinstance(self.host_overlap, tuple):
            return self.host_overlap
        share = float(self.host_overlap)  # type: ignore[arg-type]
        return share, share

    def per_slice(self, num_slices: int) -> Costs:
        """Return these costs with messages of one slice."""
        if num_slices == 1:
            return self
        comm: Any = (
            float(self.comm) / num_slices  # type: ignore[arg-type]
            if is_number(self.comm)
            else (np.asarray(self.comm, np.float64) / num_slices).tolist()
        )
        return replace(self, comm=comm)

    def messages(self, num_ranks: int) -> Times:
        """Return [S, S] durations of messages from rank to rank, 0 on the diagonal.

        Raises:
          ScheduleError: comm is given for another number of ranks.
        """
        if not is_number(self.comm) and len(self.comm) != num_ranks:  # type: ignore[arg-type]
            raise ScheduleError(
                f"Costs(comm={shorten(self.comm)}) is for "
                f"{len(self.comm)} ranks, the schedule has "  # type: ignore[arg-type]
                f"{num_ranks}; give comm[source][target] for each pair, or one number for all"
            )
        full = np.broadcast_to(np.asarray(self.comm, np.float64), (num_ranks, num_ranks))
        return np.where(np.eye(num_ranks, dtype=bool), 0.0, full)

    def lags(self, source: NDArray[np.int64], target: NDArray[np.int64], num_ranks: int) -> Times:
        """Return [A] durations of messages between the pairs of ranks in two arrays."""
        if is_number(self.comm):  # without a table of all pairs, which may be huge
            return np.where(source == target, 0.0, float(self.comm))  # type: ignore[arg-type]
        return self.messages(num_ranks)[source, target]


def is_last_forward_free(*, recomputes: bool, shares_head: bool, writes: bool) -> bool:
    """Tell whether the last stage's F computes nothing in a training step.

    Args:
      recomputes: whether its backward repeats F from its input.
      shares_head: whether all ranks share the head, and so receive the output of F.
      writes: whether F writes state, which must happen once.
    """
    return recomputes and not shares_head and not writes


def of_unit_length_by_default(costs: Costs | None) -> Costs:
    """Return the given costs; None means 1 for every F, I and W, and 2 for every B."""
    if costs is None:
        return Costs()
    need("costs", costs, Costs, "give schedules.Costs(f=..., i=..., w=..., b=...), or None")
    return costs


def _overlap(value: Any) -> float | tuple[float, ...]:
    """Convert `Costs.host_overlap` to Python numbers: one share, or two shares as a tuple."""
    several = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)
    entries = list(value) if several and len(value) == len(COPIES) else [value]
    if all(is_number(entry) and 0 <= entry <= 1 for entry in entries):
        shares = tuple(map(_plain, entries))
        return shares if several else shares[0]
    if several and len(value) == len(COPIES) + 1 and not isinstance(value, str):
        raise ScheduleError(
            f"Costs(host_overlap={shorten(value)}): the third share was removed with reads that "
            f"start early; give two, {' and '.join(COPIES)}"
        )
    raise ScheduleError(
        f"Costs(host_overlap={shorten(value)}): must be a share from 0 to 1, 1 if copies over the "
        f"host link overlap with an action's work, 0 if it waits for them, or two shares "
        f"of an action's work: {', '.join(COPIES)}"
    )


def _plain(value: object) -> float:
    """Convert a numpy number to Python's, because numpy types spread through sums."""
    if isinstance(value, np.floating):
        return float(value)
    whole = integer(value)
    number: float = value if whole is None else whole  # type: ignore[assignment]
    return number


def _check_lasts(name: str, option: object, value: object) -> None:
    if isinstance(value, float) and 0 <= value <= LONGEST:
        return  # fast path: `option` of [S, S] numbers takes long to write
    within = "" if value is option else f" has {shorten(value)}"
    check_duration(f"Costs({name}={shorten(option)}){within}", value)


def _tuple(
    name: str, option: object, value: object, wanted: str, each: type | None = None
) -> tuple[float, ...]:
    """Convert a sequence of durations (or of ``each``) to a tuple."""
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if is_array or (isinstance(value, Sequence) and not isinstance(value, str | bytes)):
        parts: tuple[float, ...] = tuple(value)  # type: ignore[arg-type]
        if parts and each is None:
            for part in parts:
                _check_lasts(name, option, part)
            return tuple(map(_plain, parts))
        if parts:
            return parts
    raise ScheduleError(
        f"Costs({name}={shorten(option)}): must be one number, or {wanted}; give the measured "
        f"time, in the same unit for all"
    )
