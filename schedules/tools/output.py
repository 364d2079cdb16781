"""Files that the commands write: drawings and timetables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from schedules.core.files import check_output, replace
from schedules.core.schedule import Schedule
from schedules.tools import options as given
from schedules.tools.records import write_json
from schedules.tools.terminal import render

DRAWINGS = (".html", ".png", ".svg", ".txt", ".json")


def check_writable(
    options: argparse.Namespace, suffixes: Sequence[str], schedules: Sequence[str] = ()
) -> None:
    """Check that the files of --output can be written, before any search or simulation.

    Args:
      options: the options of the command.
      suffixes: the suffixes of its formats.
      schedules: the timetables that it reads, files or names of families.

    Raises:
      UsageError: an unknown suffix.
      ScheduleError: a missing folder, or a file that the command reads.
    """
    for path in options.output:
        if Path(path).suffix.lower() not in suffixes:
            raise given.UsageError(
                f"--output {path}: a drawing is .html (interactive), .png, .svg, .txt or .json (a "
                f"trace for Perfetto)"
            )
        check_output("--output", path, [*schedules, options.costs])


def draw(options: argparse.Namespace, schedules: Sequence[Schedule], path: str) -> None:
    """Draw timetables into a file, in the format of its suffix."""
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


def write(schedule: Schedule, path: str) -> None:
    """Write a timetable into a .csv or a .json file."""
    if path.lower().endswith(".csv"):
        schedule.to_csv(path)
    else:
        write_json(schedule, path)
