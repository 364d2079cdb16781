"""Draw timelines as one interactive HTML page: zoom, hover, clocks and schedules side by side.

The file loads nothing and may load nothing: its Content-Security-Policy permits only its one style
and one script, by hash, and no markup from strings. The data, with schedule names, is JSON in which
no character can end the enclosing element.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from schedules.clocks.report import CAUSES, Report, Wait, sizes
from schedules.clocks.simulate import simulate
from schedules.core.action import Action, ScheduleError, printable, shorten
from schedules.core.arguments import listed
from schedules.core.costs import Costs
from schedules.core.files import replace
from schedules.core.flat import flatten
from schedules.core.schedule import Schedule
from schedules.tools.palette import CAUSES as REASONS
from schedules.tools.palette import DARK, LIGHT, NAMES, clock_name, joined, kinds

MOST_ACTIONS = 2_000_000  # most drawn actions, over all clocks and schedules; about 40 MB
SCRIPTS = (
    "read",
    "view",
    "colours",
    "paint",
    "dense",
    "hover",
    "numbers",
    "controls",
    "embed",
    "main",
)
POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass
class Entry:
    """A schedule with its costs, and its reports under one or several clocks."""

    schedule: Schedule
    costs: Costs
    reports: list[Report] = field(default_factory=list)


def save_page(
    drawn: Report | Schedule | Iterable[Report | Schedule],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> None:
    """Write one or several timelines as a self-contained web page.

    Reports of one schedule with equal costs become one timeline with a switch for the clock. The
    event clock and lockstep are always included. A missing report is simulated, unless there is a
    report of the measured clock, whose costs do not describe its actions: with it the page opens.
    A step that ran (`Pipeline.trace`) has its unit on the axis, other times that of the costs.

    Args:
      drawn: reports, or schedules, which are timed with durations of 1 for F, I and W.
      path: an ``.html`` file.
      title: its heading; by default the schedules' names.

    Raises:
      ScheduleError: there is nothing to draw, a schedule is invalid, the suffix is another, or
        there are more than `MOST_ACTIONS` actions.
    """
    items = listed(drawn, Report | Schedule)
    if not items:
        raise ScheduleError(
            "drawn is empty; give what simulate() returned, or schedules, one or several"
        )
    for item in items:
        if not isinstance(item, Report | Schedule):
            raise ScheduleError(
                f"drawn holds {shorten(item)}, which is neither a report nor a schedule; give what "
                f"simulate() returned, or schedules"
            )
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".htm"):
        raise ScheduleError(
            f"path={os.fspath(path)!r} ends in {suffix!r}; a page is written as .html, so choose "
            f"that suffix"
        )
    _check_size(items)
    entries = _entries(items)
    names = dict.fromkeys(printable(entry.schedule.name) for entry in entries)
    text = render(entries, title if title is not None else f"Timeline of {' and '.join(names)}")
    replace(text, path)


def _check_size(items: Sequence[Report | Schedule]) -> None:
    """Check the number of actions before any simulation: two clocks for each schedule."""
    schedules = [item.schedule if isinstance(item, Report) else item for item in items]
    total = sum(2 * len(order) for schedule in schedules for order in schedule.orders)
    if total > MOST_ACTIONS:
        raise ScheduleError(
            f"drawn has {total} actions (two clocks for each of {len(items)}), a page holds at "
            f"most {MOST_ACTIONS}; give fewer schedules, or build them with fewer microbatches: "
            f"the steady phase repeats itself"
        )


def _entries(items: Sequence[Report | Schedule]) -> list[Entry]:
    """Make one entry for each schedule and costs, with missing clocks; the first one opens."""
    entries: list[Entry] = []
    for item in items:
        schedule, costs = (
            (item.schedule, item.costs) if isinstance(item, Report) else (item, Costs())
        )
        same = schedule, schedule.name, costs
        for entry in entries:
            if (entry.schedule, entry.schedule.name, entry.costs) == same:
                break
        else:
            entry = Entry(schedule, costs)
            entries.append(entry)
        if isinstance(item, Report) and item not in entry.reports:
            entry.reports.append(item)
    for entry in entries:
        clocks = {report.clock for report in entry.reports}
        for clock in ("event", "lockstep"):
            if clock not in clocks and "measured" not in clocks:
                entry.reports.append(simulate(entry.schedule, entry.costs, clock))
        # The page opens on a measured clock, else on "event", which comes before "lockstep".
        entry.reports.sort(key=lambda report: (report.clock != "measured", report.clock))
    return entries


def render(entries: Sequence[Entry], title: str) -> str:
    parts = files("schedules.tools") / "page_files"
    style = (parts / "page.css").read_text(encoding="utf-8")
    bodies = [(parts / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(bodies) + "})();\n"
    data = json.dumps(_data(entries), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":  # only strings can have these, and no string may end the element
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    filled = {
        "policy": html.escape(POLICY.format(script=_hash(script), style=_hash(style))),
        "title": html.escape(printable(title)),
        "style": style,
        "data": data,
        "script": script,
    }
    page = (parts / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], page)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(entries: Sequence[Entry]) -> dict[str, Any]:
    labels = [f"{printable(e.schedule.name)}  {sizes(e.schedule)}" for e in entries]
    return {
        "kinds": NAMES,
        "causes": {cause: REASONS[cause] for cause in CAUSES},
        "themes": {"light": asdict(LIGHT), "dark": asdict(DARK)},
        "entries": [
            _entry(entry, label if labels.count(label) == 1 else f"{n}. {label}")
            for n, (entry, label) in enumerate(zip(entries, labels, strict=True), start=1)
        ],
    }


def _entry(entry: Entry, label: str) -> dict[str, Any]:
    schedule, flat = entry.schedule, flatten(entry.schedule)
    unit = max(report.unit for report in entry.reports)
    place = {
        action: (rank, position)
        for rank, order in enumerate(schedule.orders)
        for position, action in enumerate(order)
    }
    return {
        "label": label,
        "note": _note(entry.costs, unit),
        "unit": unit,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        **({"slices": schedule.num_slices} if schedule.num_slices > 1 else {}),
        "chunks": schedule.chunk_of,
        "kinds": kinds([schedule]),
        "orders": [
            {
                "kinds": _pack(flat.kind[begin:end], "u1"),
                "stages": _pack(flat.stage[begin:end], "<i4"),
                "microbatches": _pack(flat.microbatch[begin:end], "<i4"),
            }
            for begin, end in itertools.pairwise(flat.first.tolist())
        ],
        "reports": [_report(report, place) for report in entry.reports],
    }


def _report(report: Report, place: dict[Action, tuple[int, int]]) -> dict[str, Any]:
    explanation = report.explain()
    return {
        "clock": report.clock,
        "label": clock_name(report),
        "makespan": report.makespan,
        "bubble": report.bubble_rate,
        "step_bubble": report.step_bubble_rate,
        "work": report.work,
        "span": report.span,
        "peak": report.peak_activations,
        "parts": [[part[cause] for cause in CAUSES] for part in explanation.parts],
        "starts": [_pack(row, "<f8") for row in report.starts],
        "ends": [_pack(row, "<f8") for row in report.ends],
        "joined": [joined(report, rank) for rank in range(report.schedule.num_ranks)],
        "waits": [_waits(row, place) for row in explanation.waits],
        "common": [_pack(times, "<f8") for times in zip(*report.common, strict=True)],
    }


def _waits(row: Sequence[Wait], place: dict[Action, tuple[int, int]]) -> dict[str, str]:
    """Return a rank's waits in columns; -1 for a wait without an action before or after it."""
    behind = [(-1, -1) if wait.behind is None else place[wait.behind] for wait in row]
    before = [-1 if wait.position is None else wait.position for wait in row]
    return {
        "starts": _pack([wait.start for wait in row], "<f8"),
        "ends": _pack([wait.end for wait in row], "<f8"),
        "causes": _pack([CAUSES.index(wait.cause) for wait in row], "u1"),
        "before": _pack(before, "<i4"),
        "behind_rank": _pack([rank for rank, _ in behind], "<i4"),
        "behind": _pack([position for _, position in behind], "<i4"),
    }


def _pack(values: ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


def _note(costs: Costs, unit: str) -> str:
    parts = []
    for name, value in zip(
        ("F", "I", "W", "B", "message"),
        (costs.f, costs.i, costs.w, costs.b, costs.comm),
        strict=True,
    ):
        if value is None:  # B = I + W
            continue
        numbers = np.asarray(value, np.float64)
        low, high = numbers.min(), numbers.max()
        parts.append(f"{name} {low:.6g}" + (f" to {high:.6g}" if high > low else ""))
    if costs.pair is not None:
        parts.append(f"overlapped pair {costs.pair:.6g}")
    if costs.optimizer:
        parts.append(f"optimizer step {costs.optimizer:.6g} after the makespan")
    return f"Costs{f' in {unit}' if unit else ''}: {', '.join(parts)}"
