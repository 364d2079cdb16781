"""Start the processes of a job on this machine, and see that none outlives another.

A helper, which is no child of a child, holds a pipe to the launcher: when the launcher dies without
a word, as by SIGKILL, the pipe closes and the helper ends all groups.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from pipeline.processes import orphans
from pipeline.processes.agreement import numbers
from pipeline.processes.child import Child, kill, start, stop
from pipeline.processes.job import Job, free_port
from pipeline.processes.logs import Log
from pipeline.processes.signals import PASSED_ON, Signals, Stopped
from pipeline.processes.watch import LOST

__all__ = ["Job", "free_port", "run"]

NOTICE = 6.0  # seconds in which the reason of an end may follow its consequence


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
    children: list[Child] = []
    with Signals() as signals, orphans.Helper(job.grace) as helper:
        try:
            failed = _first_failure(job, log, children, signals, helper)
            if failed is None:
                return 0
            how = children[failed].how
            others = [i for i, child in enumerate(children) if child.running]
            stopping = f"; stopping {numbers(others)}" if others else ""
            log.say(f"process {failed} {how}{stopping}")
            stop(children, signal.SIGTERM, job.grace)
            log.last_words(failed, how)
        except Stopped as stopped:
            log.say(f"{stopped.number.name}: stopping all processes")
            with contextlib.suppress(Stopped):  # asked twice: at once
                stop(children, PASSED_ON[stopped.number], job.grace)
            return 128 + stopped.number
        else:
            return children[failed].code
        finally:
            kill(children)


def _first_failure(
    job: Job, log: Log, children: list[Child], signals: Signals, helper: orphans.Helper
) -> int | None:
    """Start all; the process that failed first, or None once all have ended well."""
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    port = job.port or free_port()
    for index in range(job.processes):
        with signals.held():  # nobody would know of a process half started
            child = start(job, index, port)
            helper.add(child.process.pid)
            children.append(child)
        child.copy(index, log)
        child.report(index, ends)
    for _ in children:
        index = _next(ends, log)
        children[index].finish()
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
            raise Stopped(signal.SIGTERM)


def _reason(children: Sequence[Child], ends: queue.SimpleQueue[int], lost: int) -> int:
    deadline = time.monotonic() + NOTICE
    with contextlib.suppress(queue.Empty):
        while True:
            index = ends.get(timeout=max(deadline - time.monotonic(), 0))
            children[index].finish()
            if children[index].process.returncode not in (0, LOST):
                return index
    return lost
