"""Colours, letters and words that all drawings share.

Blue against orange and yellow makes kinds distinct for colour-blind readers. Lightness increases
from B to I to F to W in steps that are visible in a print without colour; a test computes both.
Chunks after the first are hatched, underlined or in lower case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from schedules.clocks.report import Cause, Report, sizes
from schedules.core.action import KINDS, Action, Kind, ScheduleError, printable
from schedules.core.arguments import listed, need
from schedules.core.schedule import Schedule
from schedules.core.timetable import kinds_in

NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
# The text for each cause of waiting; `schedules.clocks.report` defines the causes.
CAUSES: dict[Cause, str] = {
    "fill": "the pipeline is filling: no backward pass has begun on this rank",
    "drain": "the pipeline is draining: this rank has run its last forward pass",
    "imbalance": "the work it needs has not ended elsewhere",
    "communication": "the message it needs is under way",
    "lockstep": "its message is there, but the ranks have not all met",
    "optimizer wait": "it has ended and waits for the last rank",
}
TOGETHER = "shared by all ranks"


@dataclass(frozen=True)
class Theme:
    """One set of colours, as ``#RRGGBB``.

    Attributes:
      fill: the box of each kind.
      ink: the text in each box.
      shared: the box of work that all ranks do together.
    """

    fill: dict[Kind, str]
    ink: dict[Kind, str]
    idle: str
    shared: str


LIGHT = Theme(
    fill={"F": "#56B4E9", "B": "#0B3C5D", "I": "#C8500A", "W": "#E8C91C"},
    ink={"F": "#000000", "B": "#FFFFFF", "I": "#FFFFFF", "W": "#000000"},
    idle="#F0F0F0",
    shared="#8A939C",
)
DARK = Theme(
    fill={"F": "#6BBCEC", "B": "#22598C", "I": "#D9621E", "W": "#F2DA55"},
    ink={"F": "#000000", "B": "#FFFFFF", "I": "#000000", "W": "#000000"},
    idle="#1C2229",
    shared="#7C8792",
)
# 256-colour terminals: colours of box and text, for the first chunk and for later chunks.
ANSI: dict[Kind, tuple[tuple[int, int], tuple[int, int]]] = {
    "F": ((75, 16), (117, 16)),
    "B": ((24, 231), (25, 231)),
    "I": ((166, 16), (172, 16)),
    "W": ((220, 16), (228, 16)),
}


def kinds(schedules: Iterable[Schedule]) -> list[Kind]:
    """List the kinds that occur, in the order of `KINDS`."""
    present = {kind for schedule in schedules for kind in kinds_in(schedule)}
    return [kind for kind in KINDS if kind in present]


def several(reports: Report | Iterable[Report]) -> list[Report]:
    """List the reports of a drawing, which takes one report or several."""
    items: list[Report] = listed(reports, Report)
    if not items:
        raise ScheduleError("reports is empty; give what simulate() returned, one or several")
    for report in items:
        need("reports", report, Report, "give what simulate() returned, one or several")
    return items


def unit_text(action: Action) -> str:
    """Write the unit of an action: ``3``, or ``3.1`` for slice 1 of microbatch 3."""
    cut = "" if action.slice is None else f".{action.slice}"
    return f"{action.microbatch}{cut}"


def joined(report: Report, rank: int) -> tuple[int, ...]:
    """Return the positions of pairs whose actions, p and p + 1, overlap or touch in the report."""
    pairs = report.schedule.pairs[rank] if report.schedule.pairs else ()
    starts, ends = report.starts[rank], report.ends[rank]
    return tuple(p for p in pairs if starts[p + 1] == ends[p])


def clock_name(report: Report) -> str:
    """Write the name of a report's clock, such as ``lockstep, paired ticks``."""
    parts = {
        report.clock: True,
        f"{report.pattern} ticks": report.pattern,
        "partners": report.partners,
        "delayed": report.delayed,
        f"{' and '.join(report.shared)} shared": report.shared,
    }
    return ", ".join(part for part, said in parts.items() if said)


def heading(report: Report) -> str:
    """Write the line above a drawing of a report.

    The bubble is the idle share of the whole step, which ends with the last rank.
    """
    return (
        f"{printable(report.schedule.name)}   {sizes(report.schedule)}   {clock_name(report)}   "
        f"bubble {100 * report.step_bubble_rate:.1f}% of the step   "
        f"makespan {report.makespan:.6g}{report.unit and f' {report.unit}'}"
    )
