"""Type checks of a schedule's fields, because Python allows, for example, orders=[None].

Rules, grids and clocks rely on these types. Letters are those of `schedules.core.action`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedules.core.action import ScheduleError, shorten
from schedules.core.timetable import Timetable

MOST = 10**18  # integers below this limit, and sums of a few of them, fit 64 bits


def check_schedule(schedule: Timetable) -> None:
    """Check that an object is a schedule, legal or not.

    Raises:
      ScheduleError: the object is no schedule, or one of its fields has a wrong type.
    """
    remedy = "give what schedules.build, from_orders or Schedule.from_csv returned"
    if not isinstance(schedule, Timetable):
        raise ScheduleError(f"schedule={shorten(schedule)} is not a Schedule; {remedy}")
    for part, rule in _faults(schedule):
        value = getattr(schedule, part)
        raise ScheduleError(f"Schedule({part}={shorten(value)}): {rule}; correct it")


def _faults(schedule: Timetable) -> Iterator[tuple[str, str]]:
    """Yield (field, required type) of each field of a wrong type."""
    parts: dict[str, Any] = vars(schedule)
    if not isinstance(parts["name"], str):
        yield "name", "a name is a string"
    if not is_count(parts["num_microbatches"]):
        yield "num_microbatches", "must be an integer, how many microbatches there are"
    if not is_count(parts["num_slices"]):
        yield "num_slices", "must be an integer, into how many slices sequences are cut"
    orders = parts["orders"]
    if not isinstance(orders, tuple | list) or not all(isinstance(o, tuple | list) for o in orders):
        yield "orders", "orders are a tuple of S tuples of Action, one for each rank"
    if not isinstance(parts["placement"], tuple | list):
        yield "placement", "a placement is a tuple of K ranks, one for each stage"


def is_count(value: object) -> bool:
    """Tell whether a value is a Python integer that numpy can hold."""
    return type(value) is int and abs(value) < MOST
