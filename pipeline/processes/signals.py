"""Signals that end a launcher, as an exception: so that it ends its processes first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

# What the processes get: those that Python turns into an exception let them save their work.
PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
PASSED_ON[signal.SIGHUP] = signal.SIGTERM


class Stopped(Exception):  # noqa: N818
    """The launcher was asked to end.

    Args:
      number: by which signal.
    """

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


class Signals:
    """While this context lasts, a signal raises `Stopped`; one more does so again, and no more."""

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._held = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in PASSED_ON}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A signal waits until the end of this context: nothing is left half done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise Stopped(self._asked[-1])

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._asked.append(number)
        if not self._held and len(self._asked) <= 2:  # the second one kills: nothing disturbs that
            raise Stopped(number)
