"""Files of timetables and costs: read whole or refused, and replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from schedules.core.action import ScheduleError, shorten

Where = str | os.PathLike[str]


def read(path: Where, wanted: str, what: str = "a timetable") -> bytes:
    """Read all bytes of a file; pipes and devices are refused, because they may never end.

    In errors, ``what`` says what the file should hold, and ``wanted`` what to give instead.
    """
    file = Path(os.fsdecode(path))
    try:
        if file.exists() and not file.is_file():
            reason = "Is a directory" if file.is_dir() else "Is a pipe or a device, no file"
        else:
            return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
    where = shorten(os.fsdecode(path), 200)
    raise ScheduleError(f"{where}: cannot be read as {what}: {reason}; give {wanted}")


def shown(path: Where) -> str:
    """Write a path for a message; quoted if it is long or has control characters."""
    text = os.fsdecode(path)
    return text if text.isprintable() and len(text) < 200 else shorten(text, 200)


def replace(text: str, path: Where) -> None:
    """Write text in UTF-8 atomically: a reader sees the whole old or the whole new file."""
    with open_replacement(path) as file:
        file.write(text)


@contextlib.contextmanager
def open_replacement(path: Where) -> Iterator[TextIO]:
    """Open a file that replaces another when the block succeeds; after an error the old one stays.

    Raises:
      OSError: the file cannot be written; the error names ``path``.
    """
    import secrets  # these two load many modules, and only writers need them
    import shutil

    target = Path(os.path.realpath(path))  # the target of a link, as for open()
    given = Path(path)
    is_special = given.exists() and not given.is_file()  # a pipe or device is not replaced
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    try:
        with (given if is_special else part).open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            if not is_special:
                os.fsync(file.fileno())
        if not is_special:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except OSError as error:  # a write names no file, and the others the temporary one
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def name_file(path: Where) -> Iterator[None]:
    """Name the file in an OSError of a read or write, which does not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def check_output(option: str, path: Where, inputs: Iterable[Where | None]) -> None:
    """Check, before any work, that a file can be written and is no input of the command.

    Inputs that are None, or names of things other than files, do not count.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise ScheduleError(
            f"{option} {shown(path)}: there is no folder {shown(file.parent)}; make it, or give "
            f"another path"
        )
    if file.is_dir():
        raise ScheduleError(f"{option} {shown(path)} is a folder; give the path of a file")
    sources = [Path(source) for source in inputs if source is not None]
    if file.is_file() and any(path.exists() and path.samefile(file) for path in sources):
        raise ScheduleError(
            f"{option} {shown(path)} is a file that the command reads, and it would be lost; give "
            f"another path"
        )
