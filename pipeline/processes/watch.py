"""A thread that ends this process when another one dies.

A process that waits for a dead one in a collective waits forever, or fails with words that name
nobody. The connections of `pipeline.processes.rendezvous` close when a process ends: who has not
said farewell before has died. The coordinator hears it of all others and passes it on; everybody
hears it of the coordinator. There is nothing to ask and nothing to time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from pipeline.processes.channel import Channel
from pipeline.processes.rendezvous import Links

LOST = 75  # exit code of a process that ends because another died: "try again later"
NEWS = 2.0  # seconds that a failing process waits, to hear whether another died before
LAST = 1.0  # seconds for what else a failing process does when the interpreter ends

CLOSED = "its connection closed without a farewell, as when it is killed, crashes or loses its host"


class Watch:
    """Watches the other processes until this one ends.

    Args:
      links: connections to them.
      grace: seconds that this process has to end by itself when another has died.
    """

    def __init__(self, links: Links, grace: float) -> None:
        self._links, self._grace = links, grace
        self._farewells: set[int] = set()
        self._lost, self._leaving = threading.Event(), threading.Event()
        self._failed = False

    def start(self) -> None:
        """Begin, and say farewell when the interpreter ends."""
        threading.Thread(target=self._run, name="watch processes", daemon=True).start()
        before = sys.excepthook

        def excepthook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            before(kind, error, traceback)
            self._fail(kind, error)

        sys.excepthook = excepthook
        # Runs before jax's own end, in which all processes wait for each other.
        atexit.register(self._leave)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            for index, channel in self._links.channels.items():
                ready.register(channel, selectors.EVENT_READ, index)
            while ready.get_map():
                for key, _ in ready.select():
                    if not self._hear(key.data, self._links.channels[key.data]):
                        ready.unregister(key.fileobj)

    def _hear(self, index: int, channel: Channel) -> bool:
        """Take in news from a process; whether there may be more."""
        why = CLOSED
        if self._failed:
            return False  # that others end now is its own doing
        try:
            messages = channel.receive()
        except (OSError, ValueError) as error:
            messages, why = None, f"its connection broke: {error}"
        if messages is None:
            if index not in self._farewells:
                self._end(index, why)
            return False
        for message in messages:
            if "lost" in message:
                self._end(message["lost"], message["why"])
            if "failed" in message:
                self._end(index, message["failed"])
            if "farewell" in message:
                self._farewells.add(index)
        return True

    def _end(self, lost: int, why: str) -> NoReturn:
        """Pass it on, say it, and end."""
        self._lost.set()
        cluster = self._links.cluster
        if cluster.index == 0:
            self._send(lost, lost=lost, why=why)
        _say(
            f"process {cluster.index} of {cluster.count}: process {lost} "
            f"({self._links.names[lost]}) is gone: {why}; this process cannot go on without it "
            f"and ends with exit code {LOST}"
        )
        # jax's own thread ends a process without coordinator, from C++ and in its own words.
        time.sleep(self._grace if lost else 0)
        _exit(LOST)

    def _fail(self, kind: type[BaseException], error: BaseException) -> None:
        """This process ends with an exception: say so, unless another's death is the reason."""
        if self._lost.wait(NEWS):
            time.sleep(self._grace + NEWS)  # the thread ends this process
        self._failed = True
        first = str(error).split("\n", 1)[0]
        self._send(failed=f"it failed with {kind.__name__}: {first}")
        threading.Thread(target=self._end_failed, name="end process", daemon=True).start()

    def _end_failed(self) -> NoReturn:
        """In its own end, jax would wait minutes for processes that wait for this one."""
        self._leaving.wait()
        time.sleep(LAST)
        _exit(1)

    def _leave(self) -> None:
        self._leaving.set()
        if not (self._failed or self._lost.is_set()):
            self._send(farewell=True)

    def _send(self, but: int | None = None, **message: object) -> None:
        """To all but one, or to the coordinator, which passes it on."""
        for index, channel in self._links.channels.items():
            if index != but:
                with contextlib.suppress(OSError):
                    channel.send(**message)


def _say(text: str) -> None:
    """At once, whatever the interpreter does."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
