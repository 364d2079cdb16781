"""What a schedule is: an order of actions for every rank, and a placement of stages on ranks.

Letters, used in every docstring of this package:

    S  ranks, positions on the mesh axis ``stage``
    K  stages, slices of the model in layer order; K = S * V
    V  chunks, stages per rank
    M  microbatches
    T  ticks of a lowered program

An action prints as ``{stage}{kind}{microbatch}``, for example ``3F0``: the grammar of
``torch.distributed.pipelining``, so timetables travel both ways. Two neighbouring actions of a
rank may be an overlapped pair, ``1F0&2B1``: a forward pass and a backward pass of another stage
that run as one, so that each computes while the other communicates.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
BACKWARD: tuple[Kind, ...] = ("B", "I")  # the kinds that send a gradient to the stage before

_NUMBER = r"(0|[1-9][0-9]{0,17})"  # longer ones overflow 64 bits, and int() refuses 4300 digits
_ACTION = re.compile(_NUMBER + r"([FBIW])" + _NUMBER)


class ScheduleError(ValueError):
    """A timetable that cannot be built, read or run; the message shows where and what to do."""


class Action(NamedTuple):
    """One unit of work: ``kind`` of ``stage`` for ``microbatch``.

    ``F`` is the forward pass, ``I`` the gradient for the input, ``W`` the gradient for the
    weights, ``B`` both in one go.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``"3F0"``; anything else is a ScheduleError."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"action {shorten(text)} is not of the form {{stage}}{{kind}}{{microbatch}} with "
                f"kind one of F, B, I, W; write it like 3F0"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


def shorten(text: object, most: int = 40) -> str:
    """The repr of what a user gave, cut to fit an error message."""
    try:
        shown = repr(text)
    except Exception:  # noqa: BLE001  an int of 5000 digits, or whatever an object may raise
        shown = f"<{type(text).__name__}>"
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


@dataclass(frozen=True)
class Schedule:
    """A timetable. It says in which order each rank works, not when: a clock says when.

    Attributes:
      name: the family it came from, or what the author called it; no part of equality.
      num_microbatches: M.
      orders: [S] tuples of Action, the order of each rank.
      placement: [K] ranks, the rank that holds each stage.
      pairs: [S] tuples of ascending positions: the actions at p and p + 1 of that rank's order
        are an overlapped pair, F and then B or I of another stage. Where a clock runs them as
        one, they start when both have their messages, and both send at their common end. ``()``
        if no rank has any.
    """

    name: str = field(compare=False)
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        # A schedule without pairs is written in one way only, so that equality is what it seems.
        if type(self.pairs) is tuple and all(type(row) is tuple and not row for row in self.pairs):
            object.__setattr__(self, "pairs", ())

    @property
    def num_ranks(self) -> int:
        """S."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.placement)

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """[S] tuples of the stages on each rank, in layer order; index in it is the chunk."""
        held: list[list[int]] = [[] for _ in self.orders]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @functools.cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """[K] the local index of each stage on its rank."""
        chunk = {k: n for held in self.stages_of for n, k in enumerate(held)}
        return tuple(chunk[k] for k in range(self.num_stages))

    @functools.cached_property
    def is_forward(self) -> bool:
        """True for a timetable without any backward action: inference."""
        return all(action.kind == "F" for order in self.orders for action in order)

    def forward(self) -> Schedule:
        """The same timetable with its forward actions only, and so without pairs."""
        orders = tuple(tuple(a for a in order if a.kind == "F") for order in self.orders)
        return Schedule(self.name, self.num_microbatches, orders, self.placement)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write it as a CSV file: one row per rank, an empty cell for an idle step."""
        from schedules.files.csv import to_csv  # noqa: PLC0415  it imports this module

        to_csv(self, path)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], *, name: str | None = None) -> Schedule:
        """Read a CSV file and check it; the name is the file's unless given."""
        from schedules.files.csv import from_csv  # noqa: PLC0415  likewise

        return from_csv(path, name=name)

    def __str__(self) -> str:
        """The timetable as a grid, clipped where it is too large to read."""
        from schedules.core.grid import grid  # noqa: PLC0415  likewise

        return grid(self, clip=True)


def loop_placement(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """[K] ranks: stage k on rank k % S."""
    return tuple(k % num_ranks for k in range(num_stages))


def from_orders(
    orders: Sequence[Sequence[Action | str | Sequence[Action | str]]],
    *,
    name: str = "custom",
    placement: Sequence[int] | None = None,
) -> Schedule:
    """A schedule from hand-written orders; M is read off them, and placement unless given.

    Args:
      orders: [S] sequences of actions, each an `Action` or text like ``"3F0"``. An overlapped pair
        is text like ``"1F0&2B1"``, or a tuple or list of two actions.
      name: what to call it.
      placement: [K] ranks.

    Raises:
      ScheduleError: an action that does not parse, or a stage that no rank holds. Whether the
        schedule is legal is for `check` to say.
    """
    parsed: list[tuple[Action, ...]] = []
    pairs: list[tuple[int, ...]] = []
    for order in _items("orders", orders, "one sequence of actions for each rank"):
        actions: list[Action] = []
        positions: list[int] = []
        for item in _items("orders", order, "one sequence of actions for each rank"):
            found = _read(item)
            if len(found) == 2:
                positions.append(len(actions))
            actions += found
        parsed.append(tuple(actions))
        pairs.append(tuple(positions))
    placement = (
        _read_placement(parsed)
        if placement is None
        else _items("placement", placement, "one rank for each stage")
    )
    microbatches = 1 + max((a.microbatch for order in parsed for a in order), default=-1)
    return Schedule(name, microbatches, tuple(parsed), tuple(placement), tuple(pairs))


def _items(argument: str, value: Iterable[Any], wanted: str) -> tuple[Any, ...]:
    """What is in a sequence; numpy's integers as Python's."""
    try:
        if not isinstance(value, str):
            return tuple(getattr(value, "tolist", lambda: value)())
    except TypeError:  # nothing to iterate over
        pass
    raise ScheduleError(f"{argument} hold {shorten(value)}, which is not {wanted}; give that")


def _read(item: object) -> list[Action]:
    """One action, or the two of a pair."""
    parts: Sequence[object]
    if isinstance(item, str):
        parts = item.split("&") if item.count("&") == 1 else [item]
    elif isinstance(item, tuple | list) and not isinstance(item, Action) and len(item) == 2:
        parts = item
    else:
        parts = [item]
    actions = [Action.parse(part) if isinstance(part, str) else part for part in parts]
    if not all(map(_is_action, actions)):
        raise ScheduleError(
            f"orders hold {shorten(item)}, which is neither an action nor a pair of two; write an "
            f"action like '3F0' and a pair like '1F0&2B1'"
        )
    return actions  # type: ignore[return-value]


def _is_action(item: object) -> bool:
    """Whether it is one, with numbers for numbers; whether those make sense is for `check`."""
    return isinstance(item, Action) and type(item.stage) is type(item.microbatch) is int


def _read_placement(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """[K] the rank with most of a stage's actions: one that strayed is the culprit then."""
    tally: dict[int, Counter[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            tally.setdefault(action.stage, Counter())[rank] += 1
    rank_of = {stage: ranks.most_common(1)[0][0] for stage, ranks in tally.items()}
    # With K distinct stages, one that is not in 0..K-1 leaves a gap there.
    gap = next((k for k in range(len(rank_of)) if k not in rank_of), None)
    if gap is not None:
        stray = next(k for k in rank_of if not 0 <= k < len(rank_of))
        raise ScheduleError(
            f"orders mention stage {shorten(stray)} but never stage {gap}; stages are numbered "
            f"0..K-1 without gaps, so add stage {gap} or renumber"
        )
    return tuple(rank_of[k] for k in range(len(rank_of)))
