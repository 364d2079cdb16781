"""Whether this process waits for results that do not come.

When another process has ended its program, this one may still have much to do, such as saving. But
if it runs a collective, it waits forever. Then an array is not ready, now and ever after; or jax
does not even answer, because it is still looking for the devices of all. A small computation on
CPUs makes no array before it ends: there the main thread stays at one instruction, and consumes no
time.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

# Code in which a thread may stay for long without a collective.
LIBRARIES = (sysconfig.get_path("stdlib"), *np.__path__, "<frozen")
INSTALLED = ("site-packages", "dist-packages")  # within the standard library's folder
COMPILER = "compiler.py"


class Waiting:
    """How long this process has been waiting; ask again and again."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}  # of every sign of waiting
        self._thread: threading.Thread | None = None
        self._pending: dict[Hashable, Any] = {}  # what jax has not yet, as it said last
        self._on_cpu = False

    def seconds(self, now: float) -> float:
        """How long; no longer than it has been asked.

        Args:
          now: by a clock that stands still while this process is suspended.
        """
        signs: list[Hashable] = list(self._pending)
        if self._thread is not None and self._thread.is_alive():
            signs.append(self._thread)
        else:
            self._thread = threading.Thread(target=self._ask, name="ask jax", daemon=True)
            self._thread.start()
        if self._on_cpu and (place := _place()) is not None:
            signs.append(place)
        self._since = {sign: self._since.get(sign, now) for sign in signs}
        return now - min(self._since.values(), default=now)

    def _ask(self) -> None:
        """What jax waits for; in a thread, as jax answers nobody while it looks for devices."""
        # There is no public way to ask without making jax look for them.
        from jax._src import xla_bridge  # noqa: PLC0415

        if not xla_bridge.backends_are_initialized():
            return
        pending: dict[Hashable, Any] = {}
        for array in jax.live_arrays():
            with contextlib.suppress(RuntimeError):  # deleted in this moment
                if not array.is_ready():
                    # The number of a reference that is kept tells arrays apart; of an array, not.
                    reference = weakref.ref(array)
                    pending[id(reference)] = reference
        self._pending = pending
        self._on_cpu = jax.default_backend() == "cpu"


def _place() -> Hashable | None:
    """Where the main thread is, if jax may wait there, and what it has done so far."""
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)  # noqa: SLF001
    clock = getattr(time, "pthread_getcpuclockid", None)
    if frame is None or clock is None:
        return None
    path = frame.f_code.co_filename
    inside = next((folder for folder in LIBRARIES if path.startswith(folder)), None)
    library = inside is not None and not any(name in path[len(inside) :] for name in INSTALLED)
    if library or path.endswith(COMPILER):
        return None
    return frame.f_code, frame.f_lasti, time.clock_gettime_ns(clock(main))
