"""Checks of arguments that many functions share."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from schedules.core.action import ScheduleError, shorten

LONGEST = 1e200  # the longest duration
MOST = 10**18  # integers below this limit, and sums of a few of them, fit 64 bits

P = ParamSpec("P")
T = TypeVar("T")


def renamed(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function accept the old name of a keyword too, with a warning."""

    def wrap(f: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(f)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{old}= is the old name of {new}=: give {new}= alone")
                text = f"{old}= of schedules.{f.__name__} is now {new}="
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return f(*args, **kwargs)

        return call

    return wrap


def integer(value: object) -> int | None:
    """Convert an index, such as a numpy integer, to int; None for a bool and any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_count(value: object) -> bool:
    """Tell whether a value is a Python integer that numpy can hold."""
    return type(value) is int and abs(value) < MOST


def is_number(value: object) -> bool:
    """Tell whether a value is a real number that a float can hold; a bool is not."""
    if integer(value) is None and not isinstance(value, float | np.floating):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except OverflowError:
        return False
    return True


def check_duration(what: str, value: object) -> None:
    """Check that a time is finite, and that a million such times can be summed."""
    if not (is_number(value) and math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        raise ScheduleError(
            f"{what}: a duration is a finite number >= 0; give the measured time, in the same "
            f"unit for all"
        )
    if float(value) > LONGEST:  # type: ignore[arg-type]
        raise ScheduleError(
            f"{what}: sums of durations above {LONGEST:g} overflow; choose a larger unit, the same "
            f"for all"
        )


def is_one_of(value: object, words: Iterable[str]) -> bool:
    """Tell whether a value is one of some words; the value may have any type, even an array."""
    return isinstance(value, str) and value in words


def listed(value: Any, alone: type | UnionType) -> list[Any]:
    """List a value alone, or all elements of a container."""
    try:
        return [value] if isinstance(value, alone) else list(value)
    except TypeError:  # no container; the caller will refuse the value
        return [value]


def need(argument: str, value: object, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        a = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ScheduleError(f"{argument}={shorten(value)} is not {a} {kind.__name__}; {remedy}")
