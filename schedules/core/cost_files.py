"""Costs in JSON files, as in a calibration (`pipeline`) or a report (``--json``).

Letters are those of `schedules.core.action`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from schedules.core.action import ScheduleError, shorten
from schedules.core.costs import Costs
from schedules.core.files import read, shown

NAMES = tuple(field.name for field in fields(Costs))
_WANTED = "a JSON file as Calibration.to_json writes it"


def costs_record(costs: Costs) -> dict[str, Any]:
    """Convert costs to a dict for JSON."""
    record = asdict(costs)
    # Costs without slices and host memory keep the older form of the record.
    for name, unset in {"slices": None, "host": 0.0, "host_overlap": 1.0}.items():
        if record[name] == unset:
            del record[name]
    return record


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Read the costs in a file."""
    record = read_object(path)
    try:
        return costs_of(record)
    except ScheduleError as error:
        raise ScheduleError(f"{shown(path)}: {error}") from None


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object in a file."""
    data = read(path, _WANTED, "costs")
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(
            f"{shown(path)}: cannot be read as costs: {shorten(str(error), 200)}; give {_WANTED}"
        ) from None
    if not isinstance(record, dict):
        raise ScheduleError(f"{shown(path)}: holds no JSON object; give {_WANTED}")
    return record


def costs_of(record: dict[str, Any]) -> Costs:
    """Read the costs of a record."""
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
