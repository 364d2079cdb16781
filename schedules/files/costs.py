"""Costs in JSON files, as a calibration (`pipeline`) or a report (``--json``) has them.

Letters as in `schedules.core.action`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from schedules.core.action import ScheduleError, shorten
from schedules.core.costs import Costs
from schedules.files.whole import read, shown

NAMES = tuple(field.name for field in fields(Costs))
_WANTED = "a JSON file as Calibration.to_json writes it"


def costs_record(costs: Costs) -> dict[str, Any]:
    """Everything that costs are."""
    record = asdict(costs)
    # Costs without slices and host memory are written as they always were.
    for name, unset in {"slices": None, "host": 0.0, "host_overlap": 1.0}.items():
        if record[name] == unset:
            del record[name]
    return record


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """The costs in a file.

    Raises:
      ScheduleError: no such file, or one that holds no costs.
    """
    record = read_object(path)
    try:
        return costs_of(record)
    except ScheduleError as error:
        raise ScheduleError(f"{shown(path)}: {error}") from None


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ScheduleError: no such file, or no object in it.
    """
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
    """The costs of a record.

    Raises:
      ScheduleError: it has none, or such as cannot be.
    """
    costs = record.get("costs")
    if not isinstance(costs, dict) or not {"f", "i", "w"} <= set(costs) <= set(NAMES):
        raise ScheduleError(
            f'has no "costs" with f, i and w, and of {", ".join(NAMES)} what else there is; give '
            f"{_WANTED}"
        )
    overlap = costs.get("host_overlap")
    if isinstance(overlap, list) and len(overlap) == 3:  # the last was of reads that start early
        costs = costs | {"host_overlap": overlap[:2]}
    return Costs(**costs)
