"""An action, the unit of work of a timetable, and the letters that all docstrings use.

Letters, used in every docstring of this package:

    S  ranks, positions on the mesh axis ``stage``
    K  stages, slices of the model in layer order; K = S * V
    V  chunks, stages per rank
    M  microbatches
    T  ticks of a lowered program
    A  actions of all ranks together, rank 0's first
    r  a rank

An action prints as ``{stage}{kind}{microbatch}``, for example ``3F0``: the grammar of
``torch.distributed.pipelining``, so timetables travel both ways. Two neighbouring actions of a
rank may be an overlapped pair, ``1F0&2B1``: a forward pass and a backward pass of another stage
that run as one, so that each computes while the other communicates.

A microbatch's sequences may be cut into N slices that run one after the other (Seq1F1B). An action
then carries its slice and prints as ``3F0.1``: the forward pass of stage 3 for slice 1 of
microbatch 0. A *unit* is what one action of a stage works on: a microbatch or, with slices, slice n
of microbatch m, with the number ``m * N + n``.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Self

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_NUMBER = r"(0|[1-9][0-9]{0,17})"  # more digits overflow 64 bits, and int() refuses 4300 digits
_ACTION = re.compile(_NUMBER + r"([FBIW])" + _NUMBER + r"(?:\." + _NUMBER + ")?")


class ScheduleError(ValueError):
    """A timetable that cannot be built, read or run; the message shows the place and the remedy."""


class Action(NamedTuple):
    """One unit of work: ``kind`` of ``stage`` for ``microbatch``.

    ``F`` is the forward pass, ``I`` the gradient for the input, ``W`` the gradient for the weights,
    ``B`` both gradients in one action.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def slice(self) -> int | None:
        """The slice of the microbatch's sequences; None for whole sequences."""
        return None

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse ``"3F0"``, or ``"3F0.1"`` with a slice; anything else raises ScheduleError."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"action {shorten(text)} is not of the form {{stage}}{{kind}}{{microbatch}} with "
                f"kind one of F, B, I, W; write it like 3F0"
            )
        stage, kind, microbatch, part = match.groups()
        if part is not None:
            return SlicedAction(int(stage), kind, int(microbatch), int(part))  # type: ignore[arg-type]
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


class SlicedAction(Action):
    """An action on one slice of a microbatch's sequences: a tuple of four, equal to no `Action`."""

    __slots__ = ()

    def __new__(cls, stage: int, kind: Kind, microbatch: int, slice: int) -> Self:  # noqa: A002
        return tuple.__new__(cls, (stage, kind, microbatch, slice))

    def __repr__(self) -> str:
        stage, kind, microbatch, part = tuple(self)
        return (
            f"SlicedAction(stage={stage!r}, kind={kind!r}, microbatch={microbatch!r}, "
            f"slice={part!r})"
        )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}.{self.slice}"

    @property
    def slice(self) -> int:
        """The slice of the microbatch's sequences."""
        return self[3]  # type: ignore[misc]

    def _replace(self, **changes: object) -> SlicedAction:
        fields = dict(zip((*Action._fields, "slice"), self, strict=True)) | changes
        return SlicedAction(**fields)  # type: ignore[arg-type]


def action_of(stage: int, kind: Kind, unit: int, num_slices: int = 1) -> Action:
    """Make the action of a stage on a unit, with a slice if there are several."""
    if num_slices == 1:
        return Action(stage, kind, unit)
    return SlicedAction(stage, kind, *divmod(unit, num_slices))


def unit_of(action: Action, num_slices: int = 1) -> int:
    """Return the number of the unit that an action works on."""
    return action.microbatch * num_slices + (action.slice or 0)


def shorten(text: object, most: int = 40) -> str:
    """Return the repr of a user's value, shortened for an error message."""
    try:
        shown = repr(text)
    except Exception:  # noqa: BLE001  an int of 5000 digits, or any error of an object
        shown = f"<{type(text).__name__}>"
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def printable(text: str) -> str:
    """Escape every character that a terminal might execute in place of showing it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
