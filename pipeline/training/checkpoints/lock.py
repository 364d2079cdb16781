"""One writer of a folder at a time: a lock of the operating system, released as a process dies."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no POSIX: then nobody is told
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_held: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


class Lock:
    """A folder's, as long as somebody in this process has the object.

    Args:
      file: locked.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        weakref.finalize(self, file.close)


def take(folder: Path) -> Lock | None:
    """This process's lock of a folder, None if another process has it.

    Raises:
      OSError: the folder cannot be written to.
    """
    found = _held.get(folder)
    if found is not None:
        return found
    file = (folder / NAME).open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            pass
    _held[folder] = made = Lock(file)
    return made
