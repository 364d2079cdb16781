"""Text of the command line: standard output, standard error, columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from schedules.core.action import ScheduleError
from schedules.core.text import printable


def say(text: str) -> None:
    """Print to standard output, whatever it can encode; to nobody, where a shell closed it."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def complain(text: str) -> None:
    """Say on standard error why there is nothing to show; to nobody, where a shell closed it."""
    if sys.stderr is not None:
        sys.stderr.write(f"python -m schedules: {text}\n")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column left-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(value: float) -> str:
    """Six digits are enough to read."""
    return f"{value:.6g}"


def reason(error: ScheduleError) -> str:
    """The first line of an error."""
    return printable(str(error).splitlines()[0])
