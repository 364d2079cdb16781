"""Pipeline-parallel timetables as data: build, check, time, draw and lower them. Needs no jax."""

from schedules.build import build, names
from schedules.checks.check import check
from schedules.core.action import Action, Kind, ScheduleError
from schedules.core.costs import Costs
from schedules.lowering.check_program import check_program
from schedules.lowering.lower import lower
from schedules.lowering.program import Program
from schedules.orders.schedule import Schedule, from_orders
from schedules.search.auto import Choice, auto
from schedules.timing.cuts import equal_time
from schedules.timing.differences import Difference, differences
from schedules.timing.report import Explanation, Report
from schedules.timing.simulate import simulate

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
