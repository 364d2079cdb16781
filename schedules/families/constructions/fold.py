"""Timetables given by formulas: the time of each action if every stage had its own rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from schedules.core.action import Action, Kind
from schedules.core.flat import Ints
from schedules.core.schedule import Schedule
from schedules.core.timetable import loop_placement

_make = functools.partial(tuple.__new__, Action)  # Action(*fields), without a Python call


def fold(name: str, num_ranks: int, times: Mapping[Kind, Ints]) -> Schedule:
    """Place actions timed for one rank per stage on fewer ranks, each in order of time.

    ``times`` has [K, M] times for each kind, and no two times of a stage are equal. They respect
    every dependency, so their order does on any placement: a family that is defined for V = 1 can
    run with V > 1 without a deadlock. If actions of one rank have equal times, the later stage runs
    first, which frees memory soonest.
    """
    table = np.stack(list(times.values()))
    kind, stage, microbatch = (index.ravel() for index in np.indices(table.shape))
    _, num_stages, num_microbatches = table.shape
    placement = loop_placement(num_stages, num_ranks)
    rank = np.array(placement)[stage]
    order = np.lexsort((-stage, table.ravel(), rank))
    letters = np.array(list(times), object)
    orders = []
    for mine in np.split(order, np.cumsum(np.bincount(rank, minlength=num_ranks))[:-1]):
        columns = stage[mine].tolist(), letters[kind[mine]].tolist(), microbatch[mine].tolist()
        orders.append(tuple(map(_make, zip(*columns, strict=True))))
    return Schedule(name, num_microbatches, tuple(orders), placement)
