"""Start the processes of a job on this machine, and end all when one ends early. POSIX only.

Each process leads a process group, so that the processes it starts end with it. A small Python
process, the guard, holds a pipe to the launcher. If the launcher dies without cleaning up, as by
SIGKILL, the pipe closes and the guard ends all groups.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from pipeline.processes.logs import Log
from pipeline.processes.names import COORDINATOR, PROCESS, PROCESSES, numbers

DEVICES = "--xla_force_host_platform_device_count"
HOST = "127.0.0.1"
SHUT = 1.0  # seconds to read the rest of an ended process's pipes
# Signals that end the launcher, and the signals that it passes on: processes can save their work
# on signals that Python turns into an exception.
PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
PASSED_ON[signal.SIGHUP] = signal.SIGTERM

# Events of the launcher: a process has ended, or a signal has come; with its number.
Events = queue.SimpleQueue[tuple[Literal["end", "signal"], int]]

# The command of a process until the guard knows its group. If the launcher dies, the pipe closes.
GATE = 'read -r _ && exec "$@" </dev/null'

# It runs alone, with the standard library only: importing this package would load jax.
GUARD = """
import os, signal, sys, time
groups, grace = [], float(sys.argv[1])
for line in sys.stdin:
    if line == "done\\n":
        sys.exit()
    groups.append(int(line))
def reach(number):
    for group in list(groups):
        try:
            os.killpg(group, number)
        except OSError:
            groups.remove(group)
reach(signal.SIGTERM)
until = time.monotonic() + grace
while groups and time.monotonic() < until:
    time.sleep(0.05)
    reach(0)
reach(signal.SIGKILL)
"""


@dataclass(frozen=True)
class Job:
    """The program to start, and its processes.

    Attributes:
      devices: virtual CPU devices of each process.
      port: the coordinator's port, 0 for a free port.
      grace: seconds between the request to end and the kill.
    """

    command: Sequence[str]
    processes: int
    devices: int = 1
    port: int = 0
    grace: float = 5.0

    def environment(self, process: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return a process's variables from its number, the coordinator's port and ``base``."""
        flags = f"{base.get('XLA_FLAGS', '')} {DEVICES}={self.devices}"  # the last flag counts
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONUNBUFFERED": "1",  # a killed process loses no lines
            **base,
            "XLA_FLAGS": flags.strip(),
            COORDINATOR: f"{HOST}:{port}",
            PROCESSES: str(self.processes),
            PROCESS: str(process),
        }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def run(job: Job, out: BinaryIO | None = None, err: BinaryIO | None = None) -> int:
    """Run the job to its end and return its exit code.

    Args:
      out: the target of the processes' standard output, line by line; by default the launcher's
        own.
      err: the target of the processes' standard error and of the launcher's messages.

    Returns:
      0 if all processes return 0; else the first failing process's exit code, 128 + n after signal
      n; 128 + n if signal n ended the launcher itself.
    """
    events: Events = queue.SimpleQueue()
    log = Log(
        out or sys.stdout.buffer,
        err or sys.stderr.buffer,
        unread=lambda: events.put(("signal", signal.SIGTERM)),
    )
    children: list[_Child] = []
    with _signals(events), _guard(job.grace) as watch_over:
        try:
            port = job.port or free_port()
            for index in range(job.processes):
                children.append(_start(job, index, port, log, events))
                watch_over(children[index].process.pid)
                children[index].begin()
            return _supervise(children, job.grace, events, log)
        finally:
            for child in children:
                if child.process.poll() is None:
                    child.signal(signal.SIGKILL)
                    child.process.wait()


def _supervise(children: Sequence[_Child], grace: float, events: Events, log: Log) -> int:
    """Wait until all children have ended; after a first failure or a signal, end all others.

    A signal comes as an event like others, so that it interrupts nothing halfway.
    """
    code, failed = 0, None
    kill_at = math.inf  # finite when all have been asked to end
    running = set(range(len(children)))

    def stop(number: int) -> float:
        for index in running:
            children[index].signal(number)
        return time.monotonic() + grace

    while running:
        try:
            # A wait without a timeout would not notice a signal on every platform.
            what, value = events.get(timeout=max(min(kill_at - time.monotonic(), 0.5), 0))
        except queue.Empty:
            if time.monotonic() >= kill_at:
                stop(signal.SIGKILL)
            continue
        if what == "signal":
            if kill_at < math.inf:  # the second signal: kill at once
                kill_at = 0
                continue
            code = 128 + value
            log.say(f"{signal.Signals(value).name}: stopping all processes")
            kill_at = stop(PASSED_ON[signal.Signals(value)])
            continue
        running.remove(value)
        child = children[value]
        child.finish()
        if child.process.returncode and kill_at == math.inf:
            failed, code = child, child.code
            stopping = f"; stopping {numbers(sorted(running))}" if running else ""
            log.say(f"process {value} {child.how}{stopping}")
            kill_at = stop(signal.SIGTERM)
    if failed is not None:
        log.last_words(failed.index, failed.how)
    return code


@dataclass
class _Child:
    """A process that the launcher has started, with its number."""

    index: int
    process: subprocess.Popen[bytes]  # its id is the group's id too
    readers: list[threading.Thread] = field(default_factory=list)  # they copy its lines

    @property
    def code(self) -> int:
        """The exit code of the child, in a shell's form."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def how(self) -> str:
        """The cause of the failure, for a message."""
        code = self.process.returncode
        if code < 0:
            return f"(pid {self.process.pid}) was ended by {signal.Signals(-code).name}"
        return f"(pid {self.process.pid}) failed with exit code {code}"

    def begin(self) -> None:
        """Run the program."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as gate:  # it has ended
                gate.write(b"\n")

    def signal(self, number: int) -> None:
        """Send a signal to the child and to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """End the child's remaining processes, and read its last lines."""
        self.signal(signal.SIGKILL)
        for reader in self.readers:
            reader.join(SHUT)


def _start(job: Job, index: int, port: int, log: Log, events: Events) -> _Child:
    """Start a process of a job, and threads that copy its output to the log and report its end.

    The process runs the job's command only after `_Child.begin`.
    """
    process = subprocess.Popen(  # noqa: S603  (what the user wants to run)
        ["/bin/sh", "-c", GATE, "sh", *job.command],
        env=job.environment(index, port, os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    child = _Child(index, process)
    for stream, is_error in ((process.stdout, False), (process.stderr, True)):
        reader = threading.Thread(target=log.copy, args=(index, stream, is_error), daemon=True)
        reader.start()
        child.readers.append(reader)

    def report() -> None:
        process.wait()
        events.put(("end", index))

    threading.Thread(target=report, daemon=True).start()
    return child


@contextlib.contextmanager
def _signals(events: Events) -> Iterator[None]:
    """In this context, turn signals that would end the launcher into events."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: events.put(("signal", number)))
        for number in PASSED_ON
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # from nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _guard(grace: float) -> Iterator[Callable[[int], None]]:
    """Give a function to register process groups that end if the launcher dies in this context."""
    process = subprocess.Popen(  # noqa: S603  (our own program)
        [sys.executable, "-I", "-S", "-c", GUARD, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )

    def write(line: object) -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(f"{line}\n")
                process.stdin.flush()

    try:
        yield write
    finally:
        write("done")
        with contextlib.suppress(OSError):
            process.communicate()
