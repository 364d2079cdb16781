"""Start the processes of a job on this machine, and see that none outlives another.

Each child leads a process group, so that what it starts ends with it. A helper, which is no child
of a child, holds a pipe to the launcher: when the launcher dies without a word, as by SIGKILL, the
pipe closes and the helper ends all groups. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO

from pipeline.processes import orphans
from pipeline.processes.agreement import numbers
from pipeline.processes.cluster import COORDINATOR, PROCESS, PROCESSES
from pipeline.processes.logs import Log
from pipeline.processes.watch import LOST

DEVICES = "--xla_force_host_platform_device_count"
HOST = "127.0.0.1"
SHUT = 1.0  # seconds to read what an ended process has left in its pipes
NOTICE = 2.0  # seconds in which the reason of an end may follow its consequence
INTERRUPTED = 128 + signal.SIGINT
# A signal that ends a launcher, and what its processes get: those that Python turns into an
# exception let them save their work.
SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM}
SIGNALS[signal.SIGHUP] = signal.SIGTERM


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
      command: the program and its arguments.
      processes: how many.
      devices: virtual CPU devices of each.
      port: of the coordinator, 0 for a free one.
      grace: seconds from asking a process to end until it is killed.
    """

    command: Sequence[str]
    processes: int
    devices: int = 1
    port: int = 0
    grace: float = 5.0

    def environment(self, process: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """What a process finds in its environment.

        Args:
          process: its number.
          port: the coordinator's.
          base: the launcher's own.
        """
        flags = f"{base.get('XLA_FLAGS', '')} {DEVICES}={self.devices}"  # the last one counts
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONUNBUFFERED": "1",  # a killed process takes no lines with it
            **base,
            "XLA_FLAGS": flags.strip(),
            COORDINATOR: f"{HOST}:{port}",
            PROCESSES: str(self.processes),
            PROCESS: str(process),
        }


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Stopped(Exception):  # noqa: N818
    """The launcher was asked to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(job: Job, out: BinaryIO | None = None, err: BinaryIO | None = None) -> int:
    """Run the job to its end; returns its exit code.

    Args:
      job: what to start.
      out: where the processes' standard output goes, line by line; by default the launcher's own.
      err: where their standard error goes, and what the launcher says.

    Returns:
      0 if all processes end so; else the first failing process's exit code, 128 + n after signal
      n; 128 + n if the launcher itself was ended by signal n.
    """
    log = Log(out or sys.stdout.buffer, err or sys.stderr.buffer)
    children: list[_Child] = []
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _signals(), orphans.Helper(job.grace) as helper:
        try:
            _start(job, log, children, ends, helper)
            failed = _first_failure(children, ends, log)
            if failed is None:
                return 0
            code = _code(children[failed])
            others = [i for i, c in enumerate(children) if c.process.poll() is None]
            stopping = f"; stopping {numbers(others)}" if others else ""
            log.say(f"process {failed} {_how(children[failed])}{stopping}")
            _stop(children, signal.SIGTERM, job.grace)
            log.last_words(failed, _how(children[failed]))
        except _Stopped as stopped:
            log.say(f"{signal.Signals(stopped.number).name}: stopping all processes")
            with contextlib.suppress(_Stopped):  # asked twice: at once
                _stop(children, SIGNALS[signal.Signals(stopped.number)], job.grace)
            return 128 + stopped.number
        else:
            return code
        finally:
            _kill(children)


def _start(
    job: Job,
    log: Log,
    children: list[_Child],
    ends: queue.SimpleQueue[int],
    helper: orphans.Helper,
) -> None:
    port = job.port or free_port()
    for index in range(job.processes):
        process = subprocess.Popen(  # noqa: S603  (what the user wants to run)
            list(job.command),
            env=job.environment(index, port, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        helper.add(process.pid)
        child = _Child(process)
        children.append(child)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            reader = threading.Thread(target=log.copy, args=(index, stream, is_error), daemon=True)
            reader.start()
            child.readers.append(reader)
        threading.Thread(target=_reap, args=(index, child, ends), daemon=True).start()


def _reap(index: int, child: _Child, ends: queue.SimpleQueue[int]) -> None:
    """Tell when a child ends; in this order, exactly."""
    child.process.wait()
    ends.put(index)


def _first_failure(
    children: Sequence[_Child], ends: queue.SimpleQueue[int], log: Log
) -> int | None:
    """The process that failed first, or None once all have ended well."""
    for _ in children:
        index = _next(ends, log)
        _finish(children[index])
        if children[index].process.returncode == LOST:
            # It missed another one, whose end may be reported a moment later.
            return _reason(children, ends, index)
        if children[index].process.returncode:
            return index
    return None


def _next(ends: queue.SimpleQueue[int], log: Log) -> int:
    while True:
        # A wait without end would not notice a signal on every platform.
        with contextlib.suppress(queue.Empty):
            return ends.get(timeout=0.5)
        if log.broken.is_set():
            raise _Stopped(signal.SIGTERM)


def _reason(children: Sequence[_Child], ends: queue.SimpleQueue[int], lost: int) -> int:
    deadline = time.monotonic() + NOTICE
    with contextlib.suppress(queue.Empty):
        while True:
            index = ends.get(timeout=max(deadline - time.monotonic(), 0))
            _finish(children[index])
            if children[index].process.returncode not in (0, LOST):
                return index
    return lost


def _finish(child: _Child) -> None:
    child.signal_group(signal.SIGKILL)  # what it started and left behind
    for reader in child.readers:
        reader.join(SHUT)


def _stop(children: Sequence[_Child], number: int, grace: float) -> None:
    """Ask those that run to end, and kill them after a while."""
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.signal_group(number)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(c.process.poll() is None for c in running):
        time.sleep(0.05)
    _kill(running)
    for child in running:
        _finish(child)


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.signal_group(signal.SIGKILL)
            child.process.wait()


def _code(child: _Child) -> int:
    code = child.process.returncode
    return 128 - code if code < 0 else code


def _how(child: _Child) -> str:
    code = child.process.returncode
    if code < 0:
        return f"(pid {child.process.pid}) was ended by {signal.Signals(-code).name}"
    return f"(pid {child.process.pid}) failed with exit code {code}"


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn signals that end the launcher into an exception."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        if len(asked) <= 2:  # the second one kills; more must not disturb that
            raise _Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
