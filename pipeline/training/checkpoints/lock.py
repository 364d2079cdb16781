"""One writer of a folder at a time: a lock of the operating system, freed when a process dies."""

from __future__ import annotations

import atexit
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
_locks: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()
_files: dict[Path, IO[bytes]] = {}  # a file outlives its last Lock until `_close_unused` has run
_guard = threading.RLock()  # of both tables; a finalizer may run within `take`


class Lock:
    """The lock of a folder, held while this process refers to the lock object.

    As a context manager it lets one thread at a time write to the folder, after the last save.
    """

    def __init__(self) -> None:
        self.saving: threading.Thread | None = None  # the last thread that wrote to the folder
        self._turn = threading.RLock()

    def __enter__(self) -> None:
        self._turn.acquire()
        if self.saving is not None:
            self.saving.join()

    def __exit__(self, *_: object) -> None:
        self._turn.release()


def take(folder: Path) -> Lock | None:
    """Take this process's lock of a folder; None if another process holds the lock."""
    folder = folder.resolve()
    with _guard:
        lock = _locks.get(folder)
        if lock is None:
            # Taken out of the table, so that `_close_unused` cannot close it meanwhile.
            file = _files.pop(folder, None) or _lock_file(folder / NAME)
            if file is None:
                return None
            lock = _locks[folder] = Lock()
            _files[folder] = file
            weakref.finalize(lock, _close_unused, folder).atexit = False  # `_close` runs then
        return lock


def _lock_file(path: Path) -> IO[bytes] | None:
    file = path.open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            pass
    return file


def _close_unused(folder: Path) -> None:
    """Close the file of a lock without references, unless the folder has been taken again."""
    with _guard:
        if folder not in _locks and folder in _files:
            _files.pop(folder).close()


@atexit.register
def _close() -> None:
    for file in _files.values():
        file.close()
    _files.clear()
    _locks.clear()


def _close_in_child() -> None:
    """Close the locked files that a forked process inherits, which would keep the locks."""
    _close()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child
    )
