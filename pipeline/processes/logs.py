"""Lines of several processes on one terminal, each whole and with its process's number."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import IO, BinaryIO

KEPT = 20  # last lines of a process, shown again if it fails
LONGEST = 1 << 16  # most bytes of a line; longer lines are cut


class Log:
    """The target of all lines, a file or a stream.

    Args:
      out: the target of lines of standard output.
      err: the target of lines of standard error and of the launcher's messages.
      unread: a function that is called once, when writing to a target fails.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO, unread: Callable[[], None]) -> None:
        self._out, self._err, self._lock = out, err, threading.Lock()
        self._unread: Callable[[], None] | None = unread
        self._last: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=KEPT))

    def copy(self, process: int, stream: IO[bytes], is_error: bool) -> None:
        """Copy a process's stream to its end."""
        target, prefix = self._err if is_error else self._out, b"[%d] " % process
        with stream:
            while line := stream.readline(LONGEST):
                line = line.rstrip(b"\r\n")
                self._last[process].append(line)
                self._write(target, prefix + line + b"\n")

    def say(self, text: str) -> None:
        """Write a line of the launcher."""
        self._write(self._err, f"launch: {text}\n".encode())

    def last_words(self, process: int, how: str) -> None:
        """Write a process's last lines of output to stderr again.

        A header says how the process ended.
        """
        lines = list(self._last[process])
        if not lines:
            self.say(f"process {process} {how}, and had written nothing")
            return
        text = b"".join(b"[%d] " % process + line + b"\n" for line in lines)
        head = f"launch: process {process} {how}; its last lines:\n".encode()
        self._write(self._err, head + text)

    def _write(self, target: BinaryIO, text: bytes) -> None:
        # A broken pipe must not keep the launcher from stopping the processes.
        with self._lock, contextlib.suppress(ValueError):
            try:
                target.write(text)
                target.flush()
            except OSError:
                if self._unread is not None:
                    self._unread()
                self._unread = None
