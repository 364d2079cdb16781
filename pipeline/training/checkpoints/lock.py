"""One writer of a folder at a time: a lock of the operating system, freed when a process dies."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no POSIX: no lock is possible
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_held: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


class Lock:
    """The lock of a folder, held while this process refers to the lock object."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.saving: threading.Thread | None = None  # the last thread that wrote to the folder
        weakref.finalize(self, file.close)


def take(folder: Path) -> Lock | None:
    """Take this process's lock of a folder; None if another process holds the lock.

    Raises:
      OSError: the folder cannot be written to.
    """
    folder = folder.resolve()
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


def _close_in_child() -> None:
    """Close the locked files that a forked process inherits, which would keep the locks."""
    for found in _held.values():
        found.file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
