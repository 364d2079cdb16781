"""Text of the command line: standard output, standard error, columns."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from schedules.core.action import ScheduleError, printable


def say(text: str, *, end: str = "\n") -> None:
    """Print to standard output, replacing characters that it cannot encode."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + end)
        sys.stdout.flush()
    except OSError as error:  # a broken pipe or a full disk: Python's exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(error.errno, error.strerror, "standard output") from None


def complain(text: str) -> None:
    """Print an error on standard error, if it can be written to."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"python -m schedules: {text}\n")
        sys.stderr.flush()


def open_streams() -> None:
    """Open standard streams that a shell has closed, so that no file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with a left-aligned first column."""
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
    return f"{value:.6g}"


def reason(error: ScheduleError) -> str:
    """Return the first line of an error."""
    return printable(in_options(str(error)).splitlines()[0])


_OPTIONS = {
    "num_ranks": "-S",
    "num_microbatches": "-M",
    "num_stages": "-K",
    "num_slices": "-N",
    "group": "--group",
    "max_activations": "--max-activations",
}


def in_options(text: str) -> str:
    """Replace names of Python arguments in a message by options of the command line."""
    for argument, option in _OPTIONS.items():
        text = re.sub(rf"\b{argument}=", f"{option} ", text)
        text = re.sub(rf"\b{argument}\b", option.lstrip("-"), text)
    return text
