"""Files of timetables and costs: read whole or refused, and written atomically."""

from __future__ import annotations

import os
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


def shown(path: Where) -> str:
    """Write a path for a message; quoted if it is long or has control characters."""
    text = os.fsdecode(path)
    return text if text.isprintable() and len(text) < 200 else shorten(text, 200)
