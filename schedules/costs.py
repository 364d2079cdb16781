"""How long actions and messages take. The only place that turns an action into a duration."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from schedules.ir import Kind, ScheduleError


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit of time.

    Attributes:
      f: forward pass of one stage on one microbatch.
      i: gradient for the input.
      w: gradient for the weights; a full backward ``B`` takes ``i + w``.
      comm: a message between two ranks; one that stays on its rank is free.
    """

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    comm: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ScheduleError(
                    f"Costs({field.name}={value!r}): a duration is a finite number >= 0; "
                    f"give the measured time, in the same unit for all"
                )

    def of(self, kind: Kind) -> float:
        """Duration of one action of this kind."""
        if kind == "F":
            return self.f
        return {"I": self.i, "W": self.w, "B": self.i + self.w}[kind]
