"""Timetables of rounds, changed for a comparison."""

from __future__ import annotations

import dataclasses
import itertools

from schedules import Schedule


def with_weights_at_once(schedule: Schedule) -> Schedule:
    """The timetable with each W right after its I."""
    orders = []
    for order in schedule.orders:
        others = [action for action in order if action.kind != "W"]
        pairs = [[a, a._replace(kind="W")] if a.kind == "I" else [a] for a in others]
        orders.append(tuple(itertools.chain(*pairs)))
    return dataclasses.replace(schedule, orders=tuple(orders))
