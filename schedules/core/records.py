"""Costs as JSON records; only what reads or writes files loads this module."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, TypeVar

from schedules.core.action import ScheduleError, shorten
from schedules.core.costs import Costs
from schedules.core.files import Where, read, shown

Result = TypeVar("Result")
NAMES = tuple(field.name for field in fields(Costs))
_WANTED = "a JSON file as Calibration.to_json writes it"


def parse(data: bytes, where: str, what: str, wanted: str) -> Any:
    """Parse JSON that was read from ``where``; `schedules.core.files.read` explains the others."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        text = shorten(str(error), 200)
        raise ScheduleError(f"{where}: cannot be read as {what}: {text}; give {wanted}") from None


def costs_record(costs: Costs) -> dict[str, Any]:
    """Convert costs to a dict for JSON, as in a calibration or a report."""
    record = asdict(costs)
    # Costs without slices and host memory keep the older form of the record.
    for name, unset in {"slices": None, "host": 0.0, "host_overlap": 1.0}.items():
        if record[name] == unset:
            del record[name]
    return record


def read_record(path: Where, convert: Callable[[dict[str, Any]], Result]) -> Result:
    """Read the JSON object in a file, and convert it; errors of ``convert`` name the file."""
    record = parse(read(path, _WANTED, "costs"), shown(path), "costs", _WANTED)
    if not isinstance(record, dict):
        raise ScheduleError(f"{shown(path)}: holds no JSON object; give {_WANTED}")
    try:
        return convert(record)
    except ScheduleError as error:
        raise ScheduleError(f"{shown(path)}: {error}") from None


def costs_of(record: dict[str, Any]) -> Costs:
    costs = record.get("costs")
    if not isinstance(costs, dict) or not {"f", "i", "w"} <= set(costs) <= set(NAMES):
        raise ScheduleError(
            f'has no "costs" with f, i and w, and of {", ".join(NAMES)} what else there is; give '
            f"{_WANTED}"
        )
    overlap = costs.get("host_overlap")
    if isinstance(overlap, list) and len(overlap) == 3:  # the third share is no longer used
        costs = costs | {"host_overlap": overlap[:2]}
    return Costs(**costs)
