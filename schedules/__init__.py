"""Pipeline-parallel timetables as data: build, check, time, draw and lower them. Needs no jax."""

from schedules.checks.check import check
from schedules.clocks.explain import Explanation
from schedules.core.costs import Costs
from schedules.ir import Action, Kind, Schedule, ScheduleError, from_orders
from schedules.lowering.check_program import check_program
from schedules.lowering.lower import lower
from schedules.lowering.program import Program
from schedules.registry import build, names
from schedules.report import Report
from schedules.search.auto import Choice, auto
from schedules.simulate import simulate

__all__ = [
    "Action",
    "Choice",
    "Costs",
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
    "from_orders",
    "lower",
    "names",
    "simulate",
]
