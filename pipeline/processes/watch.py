"""A thread that ends this process when another one dies, hangs, or ends too early.

A process that waits for a dead one in a collective waits forever, or fails with words that name
nobody. The connections of `pipeline.processes.rendezvous` close when a process ends: who has not
said farewell before has died. All say from time to time that they are alive: who does not is
stopped. Who has said farewell needs nobody any more, but waits until all have: if another one waits
for it all the same, it has ended too early. The coordinator hears the others and passes on what it
hears; everybody hears the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from typing import NoReturn

from pipeline.processes import departure
from pipeline.processes.batches import Batches
from pipeline.processes.channel import Channel, Message
from pipeline.processes.rendezvous import Links
from pipeline.processes.waiting import Waiting

LOST = 75  # exit code of a process that ends because another died: "try again later"
NEWS = 2.0  # seconds that a failing process waits, to hear whether another died before
LAST = 1.0  # seconds for what else a failing process does when the interpreter ends
BEAT = 2.0  # seconds between signs of life, at most
PATIENCE = 40.0  # seconds that one may wait for results after another has ended

# A process belongs to one job, as for jax.distributed; `shard_batch` finds it here.
_RUNNING: list[Watch] = []

CLOSED = "its connection closed without a farewell, as when it is killed, crashes or loses its host"


class Watch:
    """Watches the other processes until this one ends.

    Attributes:
      batches: what the processes bring to `shard_batch`.

    Args:
      links: connections to them.
      grace: seconds that this process has to end by itself when another has died.
      heartbeat: seconds without a sign of life until a process counts as hung.
    """

    def __init__(self, links: Links, grace: float, heartbeat: float) -> None:
        self._links, self._grace, self._heartbeat = links, grace, heartbeat
        self._beat = min(heartbeat / 4, BEAT)
        self._farewells: list[int] = []  # in this order
        self._lost, self._leaving = threading.Event(), threading.Event()
        self._alone = threading.Event()  # all others have said farewell
        self._failed = 0  # exit code
        self._excused: set[int] = set()
        self._waiting, self.batches = Waiting(), Batches(links)
        # Time as this process has seen it: it stands still while the process is suspended.
        self._now = 0.0
        self._heard = dict.fromkeys(links.channels, 0.0)

    def start(self) -> None:
        """Begin, and say farewell when the interpreter ends."""
        threading.Thread(target=self._run, name="watch processes", daemon=True).start()
        departure.install(self._fail, self._leave)
        _RUNNING.append(self)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            for index, channel in self._links.channels.items():
                ready.register(channel, selectors.EVENT_READ, index)
            last, due = time.monotonic(), 0.0
            while ready.get_map():
                for key, _ in ready.select(self._beat):
                    if not self._hear(key.data, self._links.channels[key.data]):
                        ready.unregister(key.fileobj)
                        del self._heard[key.data]
                before, last = last, time.monotonic()
                self._now += min(last - before, 2 * self._beat)
                if self._now >= due:
                    due = self._now + self._beat
                    self._tick()

    def _tick(self) -> None:
        """Show that this process is alive, and see whether the others are."""
        if self._failed:
            return
        self._send(alive=True)
        for index, heard in self._heard.items():
            # In its very end an interpreter has no threads any more.
            if self._now - heard > self._heartbeat and index not in self._farewells:
                self._end(
                    index,
                    f"it gave no sign of life for {self._heartbeat:g} s, as when it is stopped or "
                    f"its host hangs",
                )
        if self._links.cluster.index == 0:
            for left in [*self._farewells, *([0] if self._leaving.is_set() else [])]:
                if (why := self.batches.left_early(left)) is not None:
                    self._end(left, why)
        if self._farewells and not self._leaving.is_set():
            seconds = self._waiting.seconds(self._now)
            if seconds > PATIENCE:
                self._end(
                    self._farewells[0],
                    f"its program has ended, but process {self._links.cluster.index} goes on and "
                    f"has been waiting for it for {seconds:.0f} s",
                )

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
            if index not in self._farewells and index not in self._excused:
                self._end(index, why)
            return False
        self._heard[index] = self._now
        for message in messages:
            self._take(index, message)
        return True

    def _take(self, index: int, message: Message) -> None:
        if "lost" in message:
            self._end(message["lost"], message["why"], heard=True)
        if "failed" in message:
            # What is wrong with the batches ends every process, each by itself.
            if not self.batches.wrong or self.batches.wrong not in message["failed"]:
                self._end(index, message["failed"])
            self._excused.add(index)
        error = None
        if "batch" in message:
            error = self.batches.take(index, message)
        if "verdict" in message:
            error = self.batches.hear(message["verdict"], message["error"])
        if error:
            self._end(self._links.cluster.index, error, heard=True)
        if "farewell" in message:
            left = message["farewell"]
            self._farewells.append(left)
            if self._links.cluster.index == 0:
                self._send(left, farewell=left)
            if len(self._farewells) == self._links.cluster.count - 1:
                self._alone.set()

    def _end(self, lost: int, why: str, *, heard: bool = False) -> NoReturn:
        """Pass it on, say it, and end."""
        self._lost.set()
        cluster = self._links.cluster
        if not heard or (cluster.index == 0 and lost):
            self._send(lost=lost, why=why)
        # jax's own thread ends a process without coordinator, from C++ and in its own words: so the
        # coordinator goes last, and without it there is no time at all.
        last = 0.0 if cluster.index else 2 * LAST
        if lost == cluster.index:
            _say(f"process {lost} of {cluster.count}: {why}; it ends with exit code 1")
            time.sleep(last)
            _exit(1)
        _say(
            f"process {cluster.index} of {cluster.count}: process {lost} "
            f"({self._links.names[lost]}) is gone: {why}; this process cannot go on without it "
            f"and ends with exit code {LOST}"
        )
        time.sleep(self._grace + last if lost else 0)
        _exit(LOST)

    def _fail(self, how: str, code: int) -> None:
        """This process fails: say so, unless another's death is the reason."""
        if self._failed:
            return
        if self._lost.wait(NEWS):
            time.sleep(self._grace + NEWS)  # the thread ends this process
        self._failed = code
        self._send(failed=how)
        threading.Thread(target=self._end_failed, name="end process", daemon=True).start()

    def _end_failed(self) -> NoReturn:
        """In its own end, jax would wait minutes for processes that wait for this one."""
        self._leaving.wait(self._grace)  # for threads that do not end it may be forever
        time.sleep(LAST if self._links.cluster.index else 3 * LAST)
        _exit(self._failed)

    def _leave(self) -> None:
        """Say farewell, and wait until all have; jax would wait for them for five minutes."""
        self._leaving.set()
        if not (self._failed or self._lost.is_set()):
            self._send(farewell=self._links.cluster.index)
            self._alone.wait()

    def _send(self, but: int | None = None, **message: object) -> None:
        """To all but one, or to the coordinator, which passes it on."""
        for index, channel in self._links.channels.items():
            if index != but:
                with contextlib.suppress(OSError):
                    channel.send(**message)


def running() -> Watch | None:
    """That of this process, where it is one of several."""
    return _RUNNING[-1] if _RUNNING else None


def _say(text: str) -> None:
    """At once, whatever the interpreter does."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
