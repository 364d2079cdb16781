"""Pipeline-parallel timetables as data: build, check, time, draw and lower them. Needs no jax."""

from schedules.auto import Choice, auto
from schedules.check import check
from schedules.check_program import check_program
from schedules.costs import Costs
from schedules.explain import Explanation
from schedules.ir import Action, Kind, Schedule, ScheduleError, from_orders
from schedules.lower import lower
from schedules.program import Program
from schedules.registry import build, names
from schedules.report import Report
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
