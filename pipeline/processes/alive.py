"""Signs of life: the processes of a job report that they run, and name a silent process.

jax ends all processes if one is silent for ``heartbeat`` seconds. Its message has a number but no
host, and no number if the coordinator cannot be reached. So each process has a thread that writes a
count into the coordination service's store; process 0 reads all counts and tells the others. If
process 0 ends, jax ends the others at once. A connection to process 0, which the system then
closes, shows this a moment earlier.
"""

from __future__ import annotations

import socket
import threading
import time

import jax

from pipeline.processes import service
from pipeline.processes.cluster import Cluster
from pipeline.processes.names import write_at_once

# Shares of `heartbeat`: the time between two signs, and the silence after which a process is named.
# jax's own call to a coordinator that does not answer fails after half of `heartbeat`.
PAUSE, SILENT, UNREACHED = 0.05, 0.45, 0.35
AGAIN = 0.02  # seconds before the next connection, if the last one ended at once
LAST = 5  # seconds that a process waits at its end for a sign that is being sent
COUNTS, LOST = "alive/count", "alive/lost"
REMEDY = "Start the job again: with checkpoints it goes on from the last one"


class Signs:
    """The signs-of-life thread of one process; `start` starts the thread.

    Args:
      heartbeat: seconds without a sign of life after which jax ends all processes.
    """

    def __init__(self, here: Cluster, heartbeat: float) -> None:
        self._here, self._heartbeat, self._host = here, heartbeat, socket.gethostname()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._seen: dict[int, tuple[str, float]] = {}  # by process: its last sign, and its time
        self._told: set[int] = set()  # processes that have been named

    def start(self) -> None:
        """Start the thread that sends signs of life, until `stop` or the end of the interpreter.

        On all processes but process 0, start also the thread that watches the coordinator.
        """
        self._thread.start()
        if self._here.index:
            threading.Thread(target=self._listen, name="coordinator", daemon=True).start()

    def stop(self) -> None:
        """Send no further sign of life.

        A thread that is in a call of the service when the interpreter ends would abort the process.
        """
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(LAST)

    def _run(self) -> None:
        count = 0
        while not self._over.wait(PAUSE * self._heartbeat):
            count += 1
            late = threading.Timer(UNREACHED * self._heartbeat, self._say_gone)
            late.daemon = True
            late.start()
            try:
                self.turn(count, time.monotonic())
            except Exception:  # noqa: BLE001  # from the service, whose process has ended
                if jax.distributed.is_initialized() and not self._over.is_set():
                    self._say_gone()
                return
            finally:
                late.cancel()

    def _listen(self) -> None:
        """Wait until the coordinator's port refuses a connection, and say that process 0 is gone.

        A connection may also end while process 0 runs: gRPC closes an idle connection.
        """
        while not self._over.is_set():
            began = time.monotonic()
            try:
                with socket.create_connection(self._here.address, self._heartbeat) as connection:
                    connection.settimeout(None)
                    while connection.recv(4096):
                        pass
            except ConnectionRefusedError:
                if jax.distributed.is_initialized() and not self._over.is_set():
                    self._say_gone("has ended: see what it wrote last. jax ends this process too")
                return
            except OSError:  # the connection was closed, or failed, which `_run` sees
                pass
            # Reconnect at once after a long connection, to write the line before jax ends this
            # process.
            if time.monotonic() - began < 1:
                self._over.wait(AGAIN)

    def turn(self, count: int, now: float) -> None:
        """Send a sign of life, and look for processes that have sent none.

        Args:
          count: the number of signs that this process has sent, including this one.
          now: seconds of a monotonic clock.
        """
        service.say(COUNTS, f"{count} {self._host}", again=True)
        if self._here.index == 0:
            self._look(now)
            return
        for text in service.said(LOST).values():
            for line in text.splitlines():
                number, said = line.split(" ", 1)
                if int(number) not in {*self._told, self._here.index}:
                    self._told.add(int(number))
                    self._say(said)

    def _look(self, now: float) -> None:
        """On process 0: name the processes whose last sign is too old."""
        signs = service.said(COUNTS)
        lines = []
        for process, sign in signs.items():
            if self._seen.get(process, ("", 0.0))[0] != sign:
                self._seen[process] = sign, now
            silent = now - self._seen[process][1]
            if silent < SILENT * self._heartbeat or process in self._told:
                continue
            self._told.add(process)
            host = sign.partition(" ")[2]
            text = (
                f"process {process} on {host} has given no sign of life for {silent:.0f} s: it was "
                f"killed or stands still, or its host or link is down. After "
                f"{self._heartbeat:g} s of silence jax ends all processes. {REMEDY}"
            )
            self._say(text)
            lines.append(f"{process} {text}")
        if lines:
            before = service.said(LOST).get(0, "")
            service.say(LOST, "\n".join(filter(None, [before, *lines])), again=True)

    def _say_gone(self, how: str = "") -> None:
        how = how or (
            f"does not answer: it was killed or stands still, its host or link is down, or this "
            f"host is cut off. jax ends this process within {self._heartbeat:g} s"
        )
        where = f"process 0 at {self._here.coordinator}, which coordinates,"
        self._say(f"{where} {how}. {REMEDY}")

    def _say(self, text: str) -> None:
        here = self._here
        write_at_once(f"process {here.index} of {here.count} on {self._host}: {text}")
