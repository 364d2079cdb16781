"""Schedules and reports as plain dictionaries, for JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from schedules.clocks.report import Report, slot_options
from schedules.core.action import ScheduleError, shorten
from schedules.core.check import check
from schedules.core.files import read, replace
from schedules.core.grid import in_cells, steps
from schedules.core.records import costs_record, parse
from schedules.core.schedule import Schedule, from_orders

FIELDS = ("name", "num_microbatches", "placement", "orders")


def schedule_record(schedule: Schedule) -> dict[str, Any]:
    """Convert a schedule to a dict; an overlapped pair is written as "1F0&2B1"."""
    columns = steps(schedule)
    orders = [
        ["&".join(map(str, actions)) for _, actions in in_cells(schedule, columns, rank)]
        for rank in range(schedule.num_ranks)
    ]
    return {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        **_slices(schedule),
        "placement": list(schedule.placement),
        "orders": orders,
    }


def _slices(schedule: Schedule) -> dict[str, int]:
    return {"num_slices": schedule.num_slices} if schedule.num_slices > 1 else {}


def report_record(report: Report) -> dict[str, Any]:
    """Convert a report to a dict, per step and per rank, with idle time split by cause."""
    schedule = report.schedule
    parts = report.explain().parts
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        **_slices(schedule),
        "clock": report.clock,
        **slot_options(report),
        "makespan": report.makespan,
        "step_time": report.step_time,
        "costs": costs_record(report.costs),
        "ideal": report.ideal,
        "against_ideal": report.against_ideal,
        "efficiency": report.efficiency,
        "step_bubble_rate": report.step_bubble_rate,
        "span_bubble_rate": report.bubble_rate,
        "ranks": [
            {
                "rank": rank,
                "work": report.work[rank],
                "span": report.span[rank],
                "idle_in_span": report.idle[rank],
                "idle": dict(parts[rank]),
                "peak_activations": report.peak_activations[rank],
                "peak_crossings": report.peak_crossings[rank],
            }
            for rank in range(schedule.num_ranks)
        ],
    }


def write_json(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    replace(json.dumps(schedule_record(schedule)) + "\n", path)


def read_json(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule that `write_json` wrote, and check it."""
    where, wanted = shorten(os.fsdecode(path), 200), "a JSON file as `convert` writes it"
    record = parse(read(path, wanted), where, "a timetable", wanted)
    if not _has_shape(record):
        raise ScheduleError(
            f"{where}: is no timetable: a JSON object with {', '.join(FIELDS)}, orders being one "
            f'list for each rank of actions such as "3F0", and placement one rank for each stage'
        )
    try:
        name = record.get("name")
        schedule = from_orders(
            record["orders"],
            name=name if isinstance(name, str) else Path(os.fsdecode(path)).stem,
            placement=record["placement"],
        )
        _check_count(record.get("num_microbatches"), schedule.num_microbatches)
        return check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def _check_count(stated: object, count: int) -> None:
    if stated not in (None, count):
        raise ScheduleError(
            f"num_microbatches is {shorten(stated)}, but the orders run {count}; correct it, or "
            f"add the actions that are missing"
        )


def _has_shape(record: Any) -> bool:
    """Tell whether a record has the lists of ranks and lists of strings that it needs."""
    if not isinstance(record, dict):
        return False
    placement, orders = record.get("placement"), record.get("orders")
    return (
        isinstance(placement, list)
        and all(type(rank) is int for rank in placement)
        and isinstance(orders, list)
        and all(isinstance(row, list) and all(type(c) is str for c in row) for row in orders)
    )
