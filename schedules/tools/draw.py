"""Timelines as pictures: ranks as rows, time to the right. Needs matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.clocks.report import CAUSES, Cause, Report, Wait, sizes
from schedules.core.action import Kind, ScheduleError, printable
from schedules.core.files import open_replacement
from schedules.tools.palette import (
    LIGHT,
    NAMES,
    TOGETHER,
    clock_name,
    joined,
    kinds,
    several,
    unit_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
HATCHES = ("", "////", "....", "xxxx")  # by chunk
CAUSE_HATCHES: dict[Cause, str] = {
    "fill": "///",
    "drain": "\\\\\\",
    "imbalance": "..",
    "communication": "---",
    "lockstep": "|||",
    "optimizer wait": "",
}
FAINT, MUTED = "#C9CDD2", "#5A6370"  # hatching and text of idle time
MEANINGS = {  # by clock
    "event": "predicted: a rank waits only for its data",
    "lockstep": "predicted in lockstep: in every slot all ranks wait for the slowest",
    "measured": "measured",
}
WHITE_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}  # of a box
HEIGHT = 0.86  # height of a box; a row has height 1
SMALLEST = 3.5  # smallest font size of a label in points; narrower boxes have no label


def save_timeline(
    reports: Report | Sequence[Report],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    unit: str | None = None,
) -> None:
    """Draw one or several reports below each other, on one time axis.

    Args:
      reports: reports of `simulate`.
      path: a ``.png`` or ``.svg`` file.
      title: a line above the timelines.
      unit: the unit of the reports' times, such as "ms"; None for `Report.unit`, or the costs'.

    Raises:
      ScheduleError: there is nothing to draw, or the suffix is another.
      ImportError: matplotlib is absent.
    """
    reports = several(reports)
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ScheduleError(
            f"path={os.fspath(path)!r} ends in {suffix!r}; a timeline is written as "
            f"{' or '.join(SUFFIXES)}, so choose one of those suffixes"
        )
    figure = _draw(reports, title, unit or max(report.unit for report in reports))
    with open_replacement(path) as file:
        figure.savefig(file.buffer, dpi=160, format=suffix[1:], metadata=_METADATA[suffix])


_METADATA: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None}}


def _draw(reports: Sequence[Report], title: str | None, unit: str | None) -> Figure:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "save_timeline draws with matplotlib, which is not installed; "
            "pip install shardpipe[examples]"
        ) from None
    ranks = [report.schedule.num_ranks for report in reports]
    width = min(20.0, max(8.0, 0.26 * max(map(_units, reports))))
    height = sum(0.36 * n + 0.75 for n in ranks) + 0.75 + (0.35 if title else 0.0)
    with mpl.rc_context({"hatch.linewidth": 0.5, "svg.hashsalt": "shardpipe", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(
            len(reports), 1, sharex=True, squeeze=False, height_ratios=[n + 0.6 for n in ranks]
        )[:, 0]
        for axis, report in zip(axes, reports, strict=True):
            _timeline(axis, report, width, unit)
        axes[-1].set_xlim(0, max(report.makespan for report in reports) or 1.0)
        clocks = "; ".join(dict.fromkeys(MEANINGS[report.clock] for report in reports))
        axes[-1].set_xlabel(f"time in {unit or 'the unit of the costs'}; {clocks}")
        _legend(figure, reports, width)
        if title:
            figure.suptitle(title, fontweight="bold", fontsize=12, parse_math=False)
        return figure


def _units(report: Report) -> float:
    """Return the makespan divided by the duration of the shortest action."""
    lengths = (
        end - start
        for row in zip(report.starts, report.ends, strict=True)
        for start, end in zip(*row, strict=True)
    )
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return report.makespan / shortest


def _timeline(axis: Axes, report: Report, inches: float, unit: str | None) -> None:
    schedule = report.schedule
    ranks = range(schedule.num_ranks)
    points = 72 * inches / (report.makespan or 1.0)  # points per unit of time
    waits = report.explain().waits
    for rank in ranks:
        row = (rank - HEIGHT / 2, HEIGHT)
        axis.broken_barh([(0, report.makespan)], row, facecolor=LIGHT.idle, linewidth=0)
        _waits(axis, waits[rank], rank, points)
        together = [(start, end - start) for start, end in report.common]
        axis.broken_barh(together, row, facecolor=LIGHT.shared, **WHITE_EDGE)
        for (kind, chunk), boxes in _boxes(report, rank).items():
            hatch = HATCHES[chunk % len(HATCHES)]
            style: dict[str, Any] = {"facecolor": LIGHT.fill[kind], "hatch": hatch, **WHITE_EDGE}
            axis.broken_barh([(left, width) for left, width, _ in boxes], row, **style)
            for left, width, label in boxes:
                size = min(8.0, 1.5 * points * width / (len(label) + 0.4))
                if size >= SMALLEST:
                    colours = (LIGHT.ink[kind], LIGHT.fill[kind])
                    _label(axis, (left + width / 2, rank), label, size, colours)
        # One outline around both actions of each overlapped pair.
        starts, ends = report.starts[rank], report.ends[rank]
        both = [(starts[p], ends[p + 1] - starts[p]) for p in joined(report, rank)]
        style = {"facecolor": "none", "edgecolor": "black", "linewidth": 1.1}
        axis.broken_barh(both, row, **style)
    axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.set_ylim(schedule.num_ranks - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    heading = (
        f"{printable(schedule.name)}: {sizes(schedule)}; {clock_name(report)}; makespan "
        f"{report.makespan:.4g}{f' {unit}' if unit else ''}, bubble {report.step_bubble_rate:.1%}"
    )
    axis.set_title(heading, loc="left", fontsize=10, parse_math=False)


def _boxes(report: Report, rank: int) -> dict[tuple[Kind, int], list[tuple[float, float, str]]]:
    chunk_of = report.schedule.chunk_of
    boxes: dict[tuple[Kind, int], list[tuple[float, float, str]]] = {}
    order, starts, ends = report.schedule.orders[rank], report.starts[rank], report.ends[rank]
    for action, start, end in zip(order, starts, ends, strict=True):
        same = boxes.setdefault((action.kind, chunk_of[action.stage]), [])
        same.append((start, end - start, unit_text(action)))
    return boxes


def _waits(axis: Axes, waits: Sequence[Wait], rank: int, points: float) -> None:
    """Draw idle time, hatched by cause; the name of the cause is written if it fits."""
    row = (rank - HEIGHT / 2, HEIGHT)
    for cause, hatch in CAUSE_HATCHES.items():
        mine = [(wait.start, wait.end - wait.start) for wait in waits if wait.cause == cause]
        if mine and hatch:
            style: dict[str, Any] = {"facecolor": LIGHT.idle, "edgecolor": FAINT, "linewidth": 0}
            axis.broken_barh(mine, row, hatch=hatch, **style)
        for start, length in mine:
            if points * length > 4.2 * len(cause) + 6:
                _label(axis, (start + length / 2, rank), cause, 7.0, (MUTED, LIGHT.idle))


def _label(
    axis: Axes, at: tuple[float, float], text: str, size: float, colours: tuple[str, str]
) -> None:
    """Draw a text in its box, with a rim without hatching."""
    from matplotlib.patheffects import withStroke

    ink, ground = colours
    rim = [withStroke(linewidth=2, foreground=ground)]
    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "path_effects": rim}
    axis.text(*at, text, size=size, color=ink, **style)


def _legend(figure: Figure, reports: Sequence[Report], width: float) -> None:
    """Draw the legend: the kinds, chunks, pairs and causes of waiting that occur."""
    from matplotlib.patches import Patch

    used = kinds(report.schedule for report in reports)
    handles = [Patch(color=LIGHT.fill[k], label=f"{k}  {NAMES[k]}") for k in used]
    chunks = max(r.schedule.num_stages // r.schedule.num_ranks for r in reports)
    for chunk in range(1, min(chunks, len(HATCHES))):
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": "grey", "hatch": HATCHES[chunk]}
        handles.append(Patch(label=f"chunk {chunk}", **style))
    if any(joined(report, n) for report in reports for n in range(report.schedule.num_ranks)):
        handles.append(Patch(facecolor="none", edgecolor="black", label="overlapped pair"))
    if any(report.common for report in reports):
        handles.append(Patch(color=LIGHT.shared, label=TOGETHER))
    causes = {wait.cause for r in reports for row in r.explain().waits for wait in row}
    for cause in (cause for cause in CAUSES if cause in causes):
        style = {"facecolor": LIGHT.idle, "edgecolor": FAINT, "hatch": CAUSE_HATCHES[cause]}
        handles.append(Patch(label=cause, linewidth=0, **style))
    rows = math.ceil(len(handles) / max(4, int(width / 1.45)))
    columns = math.ceil(len(handles) / rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
