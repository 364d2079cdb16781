"""Which code and which timetables a process runs, as digests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import schedules

PACKAGES = ("pipeline", "schedules", "collectives")
INSTALLED = ("site-packages", "dist-packages")
DIGITS = 12


def digest(data: bytes) -> str:
    """A few digits that tell data apart."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def of_files(paths: Sequence[Path]) -> str:
    """A digest of files, in their order, with their names but not where they lie."""
    found = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        found.update(f"{path.name} {len(text)} ".encode() + text)
    return found.hexdigest()[:DIGITS]


def of_package(name: str) -> str | None:
    """A digest of a loaded package's sources."""
    path = sys.modules[name].__file__
    return of_files(sorted(Path(path).parent.rglob("*.py"))) if path else None


def of_script() -> str | None:
    """A digest of the program that was started, if that is a file."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return of_files([Path(script)]) if script else None


def modules() -> Iterator[tuple[str, str]]:
    """(name, digest) of what is loaded and belongs to the user: neither Python's nor installed."""
    libraries = tuple(
        f"{sysconfig.get_path(name)}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name.startswith("__m"):
            continue
        path = str(Path(path).absolute())
        known = path.startswith(libraries) or any(part in path for part in INSTALLED)
        if not known and name.split(".", 1)[0] not in PACKAGES:
            with contextlib.suppress(OSError):
                yield name, of_files([Path(path)])


def of_timetable(value: object) -> str | None:
    """A digest of the schedule in a file that an option names; None if it names something else."""
    if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".csv"):
        with contextlib.suppress(OSError, ValueError):
            return digest(repr(schedules.Schedule.from_csv(value).orders).encode())
    return None
