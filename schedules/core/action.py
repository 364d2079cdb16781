"""An action, the unit of work of a timetable, and the letters that all docstrings use.

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

import re
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

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
