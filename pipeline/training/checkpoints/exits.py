"""Calls before the interpreter ends, while threads can still start work."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

# Python 3.12.0 to 3.12.2 start no thread once the main thread has ended (CPython issue 113964).
CAN_WAIT_AT_EXIT = not (3, 12, 0) <= sys.version_info < (3, 12, 3)


def before_exit(call: Callable[[], None]) -> None:
    """Register a call for the end of the main thread, before any executor refuses work.

    Orbax writes in executors of `concurrent.futures`. These refuse new work as soon as the main
    thread has ended, and `atexit` runs after that. The executors themselves use
    `threading._register_atexit`, which runs the newest call first (CPython 3.9 to 3.14). It is no
    public name, so `atexit` is used if it is missing.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(call)
    except RuntimeError:  # the interpreter is ending already: a save then has to wait itself
        return
