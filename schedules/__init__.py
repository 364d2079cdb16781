"""Pipeline-parallel timetables as data: build, check, time, draw and lower them. Needs no jax."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from schedules.build import build, names
from schedules.core.action import Action, Kind, ScheduleError
from schedules.core.check import check
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule, from_orders
from schedules.lowering.lower import lower
from schedules.lowering.program import Program

if TYPE_CHECKING:
    from schedules.clocks.cuts import equal_time
    from schedules.clocks.differences import Difference, differences
    from schedules.clocks.report import Explanation, Report
    from schedules.clocks.simulate import simulate
    from schedules.lowering.check_program import check_program
    from schedules.search.auto import Choice, auto

__all__ = [
    "Action",
    "Choice",
    "Costs",
    "Difference",
    "Explanation",
    "Kind",
    "Program",
    "Report",
    "Schedule",
    "ScheduleError",
    "auto",
    "build",
    "check",
    "check_program",
    "differences",
    "equal_time",
    "from_orders",
    "lower",
    "names",
    "simulate",
]

# Names that building and lowering a schedule does not need: loaded on first use.
_LATER = {
    "Choice": "search.auto",
    "Difference": "clocks.differences",
    "Explanation": "clocks.report",
    "Report": "clocks.report",
    "auto": "search.auto",
    "check_program": "lowering.check_program",
    "differences": "clocks.differences",
    "equal_time": "clocks.cuts",
    "simulate": "clocks.simulate",
}
_MODULES = {home.partition(".")[0] for home in _LATER.values()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"schedules.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
