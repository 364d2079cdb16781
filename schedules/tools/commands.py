"""One function per command. Every function returns an exit code; 0 is success."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schedules.build import names
from schedules.clocks.report import CAUSES, Report, slot_options
from schedules.core.action import ScheduleError, printable
from schedules.core.check import check
from schedules.core.files import check_output, replace, shown
from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import OutOfReachError
from schedules.lowering.lower import lower
from schedules.search.auto import Choice, auto
from schedules.tools import options as given
from schedules.tools.records import report_record, schedule_record, write_json
from schedules.tools.terminal import render, wants_colour
from schedules.tools.text import columns, complain, in_options, number, reason, say

DRAWINGS = (".html", ".png", ".svg", ".txt", ".json")
ILLEGAL = 1  # exit code: a timetable is illegal, or nothing meets the limit


def draw(options: argparse.Namespace) -> int:
    _check_writable(options, DRAWINGS, options.schedules)
    schedules = [given.load(options, name) for name in options.schedules]
    for path in options.output:
        _draw_into(options, schedules, path)
    if not options.output:
        colour = wants_colour(sys.stdout)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for schedule in schedules:
            say(render(given.clocked(options, schedule), colour=colour, width=width))
    return 0


def table(options: argparse.Namespace) -> int:
    report = given.clocked(options, given.load(options, options.schedule))
    if options.json:
        say(json.dumps(report_record(report), indent=2))
        return 0
    schedule, explained = report.schedule, report.explain()
    say(_headline(report))
    used = [cause for cause in CAUSES if any(part[cause] for part in explained.parts)]
    head = ["rank", "stages", "work", *used, "idle", "in span", "peak"]
    rows = [
        [
            str(rank),
            ",".join(map(str, schedule.stages_of[rank])),
            number(report.work[rank]),
            *(number(explained.parts[rank][cause]) for cause in used),
            number(explained.total[rank]),
            number(report.idle[rank]),
            str(report.peak_activations[rank]),
        ]
        for rank in range(schedule.num_ranks)
    ]
    say(columns(head, rows))
    say(
        f"makespan {number(report.makespan)}, with the optimizer {number(report.step_time)}; "
        f"bubble {report.step_bubble_rate:.1%} of the step, {report.bubble_rate:.1%} of the "
        f"longest span"
    )
    if not math.isclose(report.against_ideal, report.efficiency):
        say(f"{report.against_ideal:.1%} of the ideal, where every backward takes what is less")
    return 0


def _headline(report: Report) -> str:
    schedule = report.schedule
    ticks = f", {report.pattern} ticks" if report.pattern else ""
    return (
        f"{printable(schedule.name)}: S={schedule.num_ranks} ranks, "
        f"K={schedule.num_stages} stages, M={schedule.num_microbatches} microbatches, "
        f"{report.clock} clock{ticks}"
    )


def check_files(options: argparse.Namespace) -> int:
    """Tell whether timetables are legal: a verdict for each, and exit code 1 if one is illegal."""
    verdicts = []
    for path in options.files:
        if not given.is_file(path) or not Path(path).is_file():
            raise given.UsageError(f"{path}: give the path of a .csv or .json file that is there")
        try:
            schedule = given.read(path)
        except ScheduleError as error:
            verdicts.append({"file": path, "legal": False, "reason": in_options(str(error))})
            continue
        try:
            check(schedule, max_activations=options.max_activations)
            verdicts.append({"file": path, "legal": True, "reason": None})
        except ScheduleError as error:
            verdicts.append(
                {"file": path, "legal": False, "reason": f"{shown(path)}: {in_options(str(error))}"}
            )
    if options.json:
        say(json.dumps(verdicts, indent=2))
    else:
        for verdict in verdicts:
            say(str(verdict["reason"] or f"{shown(str(verdict['file']))}: legal"))
    return 0 if all(verdict["legal"] for verdict in verdicts) else ILLEGAL


def compare(options: argparse.Namespace) -> int:
    """Compare timetables, the quickest first; failed builds come last, with the reason."""
    reports: list[Report] = []
    absent: list[tuple[str, str]] = []
    for label, make in _candidates(options):
        try:
            report = make()
            check(report.schedule, max_activations=options.max_activations)
            reports.append(report)
        except ScheduleError as error:
            absent.append((label, reason(error)))
    reports.sort(key=lambda report: (report.makespan, max(report.peak_activations)))
    if options.json:
        records = [report_record(report) for report in reports]
        say(json.dumps({"compared": records, "absent": dict(absent)}, indent=2))
    else:
        say(columns(_COMPARED, [_compared(report) for report in reports]))
        for label, why in absent:
            say(f"{printable(label)}: {why}")
    return 0 if reports else ILLEGAL


def _candidates(options: argparse.Namespace) -> list[tuple[str, Callable[[], Report]]]:
    """List (label, timing function) of all timetables to compare."""
    costs = given.costs(options)
    for name in options.schedules:
        given.check_source(name)
    if options.ranks is None and not all(map(given.is_file, options.schedules or [""])):
        raise given.UsageError("families are compared at given sizes, for example -S 4 -M 8")
    counts = options.stages_list or [options.ranks]

    def timed(name: str, num_stages: int | None) -> Report:
        share = 1.0 if num_stages is None else options.ranks / num_stages
        scaled = given.scaled(costs, share)
        return given.clocked(options, given.load(options, name, num_stages, scaled), scaled)

    result: list[tuple[str, Callable[[], Report]]] = []
    for name in options.schedules or names():
        for count in [None] if given.is_file(name) else counts:
            label = name if count in {None, options.ranks} else f"{name} (K={count})"
            result.append((label, lambda name=name, count=count: timed(name, count)))  # type: ignore[misc]
    return result


_COMPARED = ("schedule", "K", "makespan", "bubble", "in span", "peak", "ticks", "buffers")


def _compared(report: Report) -> list[str]:
    schedule = report.schedule
    program = lower(schedule, costs=report.costs, **slot_options(report))
    return [
        printable(schedule.name),
        str(schedule.num_stages),
        number(report.makespan),
        f"{report.step_bubble_rate:.1%}",
        f"{report.bubble_rate:.1%}",
        str(max(report.peak_activations)),
        f"{program.num_ticks} {'+'.join(program.pattern)}",
        str(program.values["operand"].device),
    ]


def choose(options: argparse.Namespace) -> int:
    """Print the best timetable for costs, limit and clock, and why the other candidates lost."""
    if (options.pattern, options.pair) != (None, None):
        raise given.UsageError(
            "auto chooses slots itself, and without pairs; leave out --pattern and --pair"
        )
    _check_writable(options, (".csv", *DRAWINGS))
    try:
        choice = auto(
            options.ranks,
            options.microbatches,
            options.stages,
            costs=given.costs(options),
            max_activations=options.max_activations,
            clock=options.clock,
            partners=options.partners,
            delayed=options.delayed,
            budget=options.budget,
            seed=options.seed,
        )
    except OutOfReachError as error:
        complain(in_options(str(error)))
        return ILLEGAL
    for path in options.output:
        if given.is_file(path):
            _write(choice.schedule, path)
        else:
            _draw_into(options, [choice.schedule], path)
    say(json.dumps(_chosen(choice), indent=2) if options.json else in_options(str(choice)))
    return 0


def _chosen(choice: Choice) -> dict[str, Any]:
    candidates = [
        {
            "name": candidate.name,
            "makespan": candidate.makespan if candidate.schedule else None,
            "peak_activations": candidate.peak if candidate.schedule else None,
            "lost": candidate.lost and in_options(candidate.lost),
        }
        for candidate in choice.candidates
    ]
    return {
        "winner": schedule_record(choice.schedule),
        "report": report_record(choice.report),
        "candidates": candidates,
    }


def convert(options: argparse.Namespace) -> int:
    if not given.is_file(options.target):
        raise given.UsageError(f"{options.target}: a timetable is written as .csv or .json")
    check_output("FILE", options.target, [options.schedule, options.costs])
    schedule = given.load(options, options.schedule)
    _write(schedule, options.target)
    if options.json:
        say(json.dumps(schedule_record(schedule)))
    return 0


def _check_writable(
    options: argparse.Namespace, suffixes: Sequence[str], schedules: Sequence[str] = ()
) -> None:
    """Check that the files of --output can be written, before any search or simulation."""
    for path in options.output:
        if Path(path).suffix.lower() not in suffixes:
            raise given.UsageError(
                f"--output {path}: a drawing is .html (interactive), .png, .svg, .txt or .json (a "
                f"trace for Perfetto)"
            )
        check_output("--output", path, [*schedules, options.costs])


def _draw_into(options: argparse.Namespace, schedules: Sequence[Schedule], path: str) -> None:
    name = path.lower()
    if name.endswith(".html"):
        from schedules.tools.page import save_page

        # The page simulates the event clock itself, from the costs in the reports.
        asked = argparse.Namespace(**{**vars(options), "clock": "lockstep"})
        reports = [given.clocked(asked, schedule) for schedule in schedules]
        save_page(reports, path, title=options.title)
        return
    reports = [given.clocked(options, schedule) for schedule in schedules]
    if name.endswith((".png", ".svg")):
        from schedules.tools.draw import save_timeline

        save_timeline(reports, path, title=options.title)
    elif name.endswith(".json"):
        from schedules.tools.trace import save_trace

        save_trace(reports, path)
    else:
        text = "\n\n".join(render(report, colour=False) for report in reports)
        replace(text + "\n", path)


def _write(schedule: Schedule, path: str) -> None:
    if path.lower().endswith(".csv"):
        schedule.to_csv(path)
    else:
        write_json(schedule, path)
