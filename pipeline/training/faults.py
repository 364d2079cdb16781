"""Requests to stop a run, and a watchdog for a run that hangs.

A signal reaches one process, or all processes at different moments. All processes run each step
together, so a process that stops one step early leaves the others waiting in a collective for ever.
So processes agree on a step by jax's coordination service (`Stop`). A process that waits for ever
in a collective does not run Python, so a thread reports the hang (`Watchdog`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self

import jax
import numpy as np

from collectives import STAGE
from pipeline.base.arguments import is_number
from pipeline.processes import service
from pipeline.processes.names import numbers, text_of_processes, write_at_once

LOOK = 0.3  # seconds between two checks for a request to stop
ANSWER = 60.0  # seconds that processes wait for each other's reports
SIGNALS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
STUCK = 70  # the exit code of a process whose step hangs


class Stop:
    """The request to stop a run, read once a step; all processes get the same answer.

    `stop_on_signals` makes a `Stop`. With several processes, a thread checks whether any process
    was asked to stop. Each process then reports its current step, and begins no other step until
    all have reported. All processes stop after the latest of these steps.

    Attributes:
      reason: the cause of the request, such as "SIGTERM"; "" without a request.
    """

    _made = itertools.count()  # equal in all processes, which make them in the same order

    def __init__(self) -> None:
        self.reason, self._topic = "", f"stop/{next(self._made)}"
        self._asked, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._begun = -1  # the last step that was allowed to begin
        self._holds = False  # whether no further step may begin until all have reported
        self._last: Future[int] = Future()  # the step before which all stop
        self._is_alone = jax.process_count() == 1
        if not self._is_alone:
            threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def ask(self, reason: str = "stop") -> None:
        """Ask all processes to stop; a call in one process is enough."""
        self.reason = self.reason or reason
        self._asked.set()

    def __call__(self) -> bool:
        """Tell whether to stop before the next step; call this once before each step."""
        return self.requested(self._begun + 1)

    def requested(self, step: int) -> bool:
        """Tell whether to stop before this step. Every process must call this before each step.

        Raises:
          TimeoutError: a process did not report its step.
        """
        if self._is_alone:
            self._begun = step
            return self._asked.is_set()
        with self._lock:
            if not self._holds:
                self._begun = step
                return False
        if step >= self._last.result():
            return True
        self._begun = step
        return False

    def close(self) -> None:
        """End the thread that checks for requests."""
        self._over.set()

    def _watch(self) -> None:
        try:
            while not self._over.is_set():
                if self._asked.wait(LOOK) or service.said(f"{self._topic}/asked"):
                    self._last.set_result(self._agree())
                    return
        except Exception as error:  # noqa: BLE001  # from the service: it must not block the run
            self._last.set_exception(error)

    def _agree(self) -> int:
        if self._asked.is_set():
            service.say(f"{self._topic}/asked", self.reason)
        with self._lock:
            self._holds = True
            begun = self._begun
        service.say(f"{self._topic}/begun", str(begun))
        count = jax.process_count()
        said = service.hear(f"{self._topic}/begun", count, ANSWER)
        if len(said) < count:
            missing = text_of_processes([p for p in range(count) if p not in said])
            raise TimeoutError(
                f"process {jax.process_index()} of {count} is to stop and heard nothing of "
                f"{missing} within {ANSWER:g} s; stop_on_signals() belongs around the loop of "
                f"every process, and stop.requested(step) before each of its steps"
            )
        self.reason = self.reason or next(iter(service.said(f"{self._topic}/asked").values()))
        return 1 + max(map(int, said.values()))


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Let SIGTERM, SIGHUP and Ctrl-C ask the run to stop; a second signal ends it at once.

    An ignored SIGHUP, as under nohup, stays ignored.

    ::

        with stop_on_signals() as stop:
            for step in range(steps):
                if stop.requested(step):
                    break
                ...
            checkpoints.save(step, model, optimizer)

    Raises:
      ValueError: not called in the main thread, where Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on_signals() was called in a thread, and Python hands signals to the main one "
            "only; enter it there, or call Stop().ask() yourself"
        )
    stop = Stop()
    before: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        for one, handler in before.items():  # a handler that is not Python's is None
            signal.signal(one, signal.SIG_DFL if handler is None else handler)

    def handle(number: int, _: object) -> None:
        if stop._asked.is_set():  # noqa: SLF001
            give_back()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        stop.ask(name)
        with contextlib.suppress(OSError):  # the terminal may be closed
            write_at_once(f"{name}: stopping after this step; once more ends it at once")

    try:
        for number in SIGNALS:
            if number.name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
        yield stop
    finally:
        give_back()
        stop.close()


class Watchdog:
    """A thread that ends a process whose step hangs, and reports the steps of all processes.

    A waiting collective cannot be interrupted, and the main thread runs no Python meanwhile. So a
    thread checks the time since the last step began. The watchdog knows the step but not the tick,
    because devices report nothing before a step ends.

    Args:
      seconds: the time limit of a step. The first step, and a step that JAX compiles anew, may take
        ten times as long.
      mesh: the pipeline's mesh, to report the ranks of this process.
      end: a function that ends the process; by default at once, with exit code 70.

    Raises:
      ValueError: ``seconds`` is no number > 0.
    """

    def __init__(
        self, seconds: float, mesh: Any = None, *, end: Callable[[int], Any] | None = None
    ) -> None:
        if not is_number(seconds) or not 0 < seconds < math.inf:
            raise ValueError(
                f"seconds={seconds!r}: must be a number > 0, how long a step may take before it "
                f"counts as stuck"
            )
        self._seconds, self._mesh, self._end = seconds, mesh, os._exit if end is None else end
        self._step: int | None = None
        self._beats, self._at = 0, time.monotonic()
        self._compiled_at = 1  # number of the last beat in which JAX compiled anything
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int) -> None:
        """Record that a step begins."""
        self._step, self._at = step, time.monotonic()
        self._beats += 1

    def rest(self) -> None:
        """Record that no step is running, as in an evaluation."""
        self._step = None

    def __enter__(self) -> Self:
        self._at = time.monotonic()
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        """Record any event of a compilation: tracing, lowering, or compiling."""
        del duration_secs
        if event.startswith("/jax/core/compile/"):
            self._compiled_at = self._beats

    def _watch(self) -> None:
        look = min(self._seconds / 4, 1.0)
        told = False
        while not self._over.wait(look):
            limit = self._seconds * (10 if self._beats <= self._compiled_at else 1)
            late = self._step is not None and time.monotonic() - self._at > limit
            if jax.process_count() > 1 and not told and (late or service.said("stuck")):
                told = True  # so that the first late process can report the steps of the others
                service.say("stuck", self._state())
            if late:
                self._report(look)
                return

    def _state(self) -> str:
        if self._step is None:
            return "in no step"
        return f"for {time.monotonic() - self._at:.0f} s in step {self._step}"

    def _report(self, look: float) -> None:
        index, count = jax.process_index(), jax.process_count()
        lines = [f"process {index} of {count}{self._ranks()} is stuck: {self._state()}"]
        if count > 1:
            others: dict[int, str] = {}
            with contextlib.suppress(Exception):  # the service ends with its process
                others = service.hear("stuck", count, 4 * look)
            for process in range(count):
                if process != index:
                    said = others.get(process, "says nothing: it is dead, cut off, or has ended")
                    lines.append(f"  process {process}: {said}")
        if self._over.is_set():  # the step has failed meanwhile, and its exception says why
            return
        lines.append(
            f"a step may take {self._seconds:g} s; it ends with exit code {STUCK}. The stacks of "
            f"its threads:"
        )
        write_at_once("\n".join(lines))
        with contextlib.suppress(Exception):  # stderr may not be a file
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        if count > 1:  # other late processes need time for their reports before this one ends
            time.sleep(2 * look)
        self._end(STUCK)

    def _ranks(self) -> str:
        if self._mesh is None:
            return ""
        axis = self._mesh.axis_names.index(STAGE)
        own = {
            place[axis]
            for place, device in np.ndenumerate(self._mesh.devices)
            if device.process_index == jax.process_index()
        }
        return f" (rank{'s' * (len(own) > 1)} {numbers(sorted(own))})"
