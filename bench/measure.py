"""Timing on a noisy machine: variants take turns, and only ratios of medians are reported."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
Variant = Callable[[], Any]  # runs the thing, returns its results
Timer = Callable[[], float]  # runs the thing, returns seconds
SETTLED = 4  # runs after which a system has given a process the memory that it takes anew each time


class ContradictionError(RuntimeError):
    """Numbers that cannot all be right."""


def seconds(variant: Variant) -> float:
    """One run, until its results are there."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(variant())
    return time.perf_counter() - start


def behind_itself(timer: Timer) -> Timer:
    """A timer whose every run comes right behind another, as the steps of a training do.

    Results are there before a step has given its memory back, so that the next one pays for it: a
    step of 161 ms takes 175 behind one that holds 290 MB in buffers that no heap keeps.
    """

    def timed() -> float:
        timer()
        return timer()

    return timed


def interleaved(
    timers: Mapping[Name, Timer], rounds: int, unmeasured: int = 1
) -> dict[Name, float]:
    """The median of each timer, in seconds, after unmeasured runs."""
    taken = in_turns(timers, rounds, unmeasured)
    return {name: statistics.median(times) for name, times in taken.items()}


def in_turns(
    timers: Mapping[Name, Timer], rounds: int, unmeasured: int = 1
) -> dict[Name, list[float]]:
    """All times of each timer, in seconds, after unmeasured runs.

    A round runs each timer once: whatever slows the machine for a while slows all alike.
    """
    for _ in range(unmeasured):
        for timer in timers.values():
            timer()
    taken: dict[Name, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            taken[name].append(timer())
    return taken


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
