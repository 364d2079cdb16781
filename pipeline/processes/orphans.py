"""A helper that ends process groups when the launcher dies without a word.

It is a small Python of its own, in a session of its own, that reads a pipe. The launcher writes
the groups it starts; if the pipe closes before it has written that all is well, they are ended.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import TracebackType
from typing import Self

# Runs alone: a file of this package would load jax, for nothing.
PROGRAM = """
import os, signal, sys, time
groups, grace = [], float(sys.argv[1])
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
for number, pause in ((signal.SIGTERM, grace), (signal.SIGKILL, 0)):
    running = []
    for group in groups:
        try:
            os.killpg(group, number)
            running.append(group)
        except OSError:
            pass
    until = time.monotonic() + pause
    while running and time.monotonic() < until:
        time.sleep(0.05)
        for group in list(running):
            try:
                os.killpg(group, 0)
            except OSError:
                running.remove(group)
"""


class Helper:
    """The launcher's side of it; a context manager.

    Args:
      grace: seconds from asking a group to end until it is killed.
    """

    def __init__(self, grace: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603  (our own program)
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def add(self, group: int) -> None:
        """Watch over a process group."""
        self._write(f"{group}\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._write("done\n")
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _write(self, text: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(text)
                self._process.stdin.flush()
