"""A second process that computes on one core, for baselines a pipeline of one core a rank meets.

XLA's CPU backend spreads elementwise loops over every core of its process whatever the flags say,
so an unpipelined baseline in the process of the pipeline would have both cores. Linux only.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

from bench.measure import Variant, seconds

Result = TypeVar("Result")
Builders = Mapping[str, Callable[[], Variant]]


def call(function: Callable[..., Result], *arguments: Any, busy: bool = False) -> Result:
    """The result or the error of a module-level function in a process that has one core.

    Args:
      function: of a module that can be imported.
      arguments: for it.
      busy: whether every other core does the same meanwhile, in a process of its own.
    """
    with ExitStack() as stack:
        some = [
            stack.enter_context(Elsewhere(_Caller, core))
            for core in (cores() if busy else cores()[:1])
        ]
        for one in some:
            one.begin("call", function, arguments)
        found: list[Result] = [one.end() for one in some]
    return found[0]


class Elsewhere:
    """An object of another process, which has one core; a context manager.

    Args:
      make: a module-level function, or a `functools.partial` of one, that makes it there.
      core: which; by default the first.
    """

    def __init__(self, make: Callable[[], Any], core: int | None = None) -> None:
        self._here, self._there = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("spawn")
        given = cores()[0] if core is None else core, self._there, make
        self._process = context.Process(target=_serve, args=given, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._there.close()  # so that the end of the other process is the end of the pipe
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # it has died, as whoever called it knows
            self._here.send(None)
        self._process.join()

    def begin(self, method: str, *arguments: Any) -> None:
        """Ask it to do something."""
        self._here.send((method, arguments))

    def end(self) -> Any:
        """Outcome of a call: its result, or the error that it raised."""
        found, error = self._here.recv()
        if error is not None:
            raise error
        return found

    def call(self, method: str, *arguments: Any) -> Any:
        """Both."""
        self.begin(method, *arguments)
        return self.end()


class Pinned(Elsewhere):
    """Runs variants elsewhere, on request; a context manager.

    Args:
      builders: a module-level function that returns name -> builder of a variant. It is called
        in the other process, after that has been pinned to one core.
    """

    def __init__(self, builders: Callable[[], Builders]) -> None:
        super().__init__(functools.partial(_Variants, builders))

    def seconds(self, name: str) -> float:
        """One run of a variant, timed there."""
        return float(self.call("seconds", name))


class _Caller:
    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return function(*arguments)


class _Variants:
    def __init__(self, builders: Callable[[], Builders]) -> None:
        self._variants = {name: build() for name, build in builders().items()}

    def seconds(self, name: str) -> float:
        return seconds(self._variants[name])


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _pin(core: int) -> None:
    # Before jax makes its threads, which inherit it.
    os.sched_setaffinity(0, {core})


def _serve(core: int, channel: Connection, make: Callable[[], Any]) -> None:
    _pin(core)
    served, failed = None, None
    try:
        served = make()
    except Exception as error:  # noqa: BLE001  whoever calls is told
        failed = error
    while (asked := channel.recv()) is not None:
        method, arguments = asked
        if failed is not None:
            channel.send((None, failed))
            continue
        try:
            channel.send((getattr(served, method)(*arguments), None))
        except Exception as error:  # noqa: BLE001  likewise
            channel.send((None, error))
