"""Tables of published numbers, with the function that computes ours and a tolerance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A published number, the function that computes ours, and why they differ (else "")."""

    name: str
    published: float
    ours: Callable[[], float]
    reason: str


def row(name: str, published: float, ours: Callable[..., float], *of: Any, reason: str = "") -> Row:
    """A row whose number a function computes from these arguments."""
    return Row(name, published, functools.cache(functools.partial(ours, *of)), reason)


@dataclass(frozen=True)
class Table:
    """A table of a source.

    Attributes:
      source: paper or repository, a Markdown link.
      place: the table there.
      quantity: what the numbers are, and whether they were measured or calculated.
      model: the assumptions of our calculation, and the calibrated number.
      tolerance: the largest error of a row without a reason; a row with a reason exceeds it.
      rows: the numbers.
      measured: whether the source measured them. The error is then relative, ours / published - 1;
        of a number that the source calculated it is the difference.
    """

    source: str
    place: str
    quantity: str
    model: str
    tolerance: float
    rows: Sequence[Row]
    measured: bool = False

    def error(self, row: Row) -> float:
        """How far our number is from the published one."""
        return row.ours() / row.published - 1 if self.measured else row.ours() - row.published

    def keeps(self, row: Row) -> bool:
        """Tell whether the error is within the tolerance, or beyond it if the row has a reason."""
        return (abs(self.error(row)) <= self.tolerance + 1e-9) != bool(row.reason)

    def text(self, error: float, sign: str = "") -> str:
        """An error in percent, or with the digits of a calculated number."""
        return f"{error:{sign}.1%}" if self.measured else f"{round(error, 5) + 0.0:{sign}.5f}"

    def line(self, row: Row) -> list[str]:
        """The cells of a row."""
        numbers = f"{row.published:.5g}", f"{row.ours():.5g}", self.text(self.error(row), "+")
        return [row.name, *numbers, row.reason if self.keeps(row) else f"NOT KEPT {row.reason}"]

    def summary(self) -> str:
        """The line of this table in bench/notes/schedules.md."""
        errors: dict[str, list[float]] = {}
        for row in self.rows:
            errors.setdefault(row.reason, []).append(abs(self.error(row)))
        worst = max(errors.pop(""))
        more = [
            f"; {len(each)} differ{'s' * (len(each) == 1)} by {'up to ' * (len(each) > 1)}"
            f"{self.text(max(each))}: {reason}"
            for reason, each in errors.items()
        ]
        error = (self.text(worst) if worst > 1e-9 else "none") + "".join(more)
        cells = (
            f"{self.source}, {self.place}",
            self.quantity,
            str(len(self.rows)),
            error,
            self.model,
        )
        return f"| {' | '.join(cells)} |"


HEADER = "| source | numbers | rows | largest error | our model |\n|---|---|---|---|---|"
