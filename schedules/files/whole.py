"""Files of timetables and costs: read whole or refused, and written atomically."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from schedules.core.action import ScheduleError, shorten

Where = str | os.PathLike[str]


def read(path: Where, wanted: str, what: str = "a timetable") -> bytes:
    """Read all bytes of a file; pipes and devices are refused, because they may never end.

    Raises:
      ScheduleError: the file cannot be read; the message has ``wanted``, what to give instead, and
        ``what``, the expected content.
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


def replace(text: str, path: Where) -> None:
    """Write ASCII text atomically: a reader sees the whole old or the whole new file.

    Raises:
      OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # the target of a link, as for open()
    if target.exists() and not target.is_file():  # a pipe or device is not replaced
        target.write_text(text, encoding="ascii", newline="")
        return
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        part.write_text(text, encoding="ascii", newline="")
        part.replace(target)
    except OSError as error:
        if error.filename is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # the user's path
    finally:
        part.unlink(missing_ok=True)


def shown(path: Where) -> str:
    """Write a path for a message; quoted if it is long or has control characters."""
    text = os.fsdecode(path)
    return text if text.isprintable() and len(text) < 200 else shorten(text, 200)
