"""Timelines as pictures: ranks as rows, time to the right. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.ir import KINDS, Kind, ScheduleError
from schedules.simulate import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
# Blue against orange and yellow tells kinds apart for colour-blind readers. Luminance falls from
# W by F and I to B, for print without colour. Chunks beyond the first are hatched.
COLOURS: dict[Kind, str] = {"F": "#56B4E9", "B": "#0B3C5D", "I": "#C8500A", "W": "#E8C91C"}
INK: dict[Kind, str] = {"F": "black", "B": "white", "I": "white", "W": "black"}
HATCHES = ("", "////", "....", "xxxx")
IDLE = "#F0F0F0"
HEIGHT = 0.86  # of a row, of 1
SMALLEST = 3.5  # points of a label; a box too narrow for that has none


def save_timeline(
    reports: Report | Sequence[Report],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> None:
    """Draw one or several reports below each other, on one time axis.

    Args:
      reports: what `simulate` returned.
      path: a ``.png`` or ``.svg`` file.
      title: a line above it all.

    Raises:
      ScheduleError: nothing to draw, or another suffix.
      ImportError: matplotlib is absent.
    """
    reports = [reports] if isinstance(reports, Report) else list(reports)
    suffix = Path(path).suffix.lower()
    if not reports:
        raise ScheduleError("reports is empty; give what simulate() returned, one or several")
    if suffix not in SUFFIXES:
        raise ScheduleError(
            f"path={os.fspath(path)!r} ends in {suffix!r}; a timeline is written as "
            f"{' or '.join(SUFFIXES)}, so choose one of those suffixes"
        )
    figure = _draw(reports, title)
    figure.savefig(path, dpi=160, format=suffix[1:], metadata=_METADATA[suffix])


_METADATA: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None}}


def _draw(reports: Sequence[Report], title: str | None) -> Figure:
    """The whole picture."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  optional, and slow to load
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise ImportError(
            "save_timeline draws with matplotlib, which is not installed; "
            "pip install shardpipe[examples]"
        ) from None
    ranks = [report.schedule.num_ranks for report in reports]
    width = min(20.0, max(8.0, 0.26 * max(map(_units, reports))))
    height = sum(0.36 * n + 0.75 for n in ranks) + 0.55 + (0.35 if title else 0.0)
    with mpl.rc_context({"hatch.linewidth": 0.5, "svg.hashsalt": "shardpipe", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(
            len(reports), 1, sharex=True, squeeze=False, height_ratios=[n + 0.6 for n in ranks]
        )[:, 0]
        for axis, report in zip(axes, reports, strict=True):
            _timeline(axis, report, width)
        axes[-1].set_xlim(0, max(report.makespan for report in reports) or 1.0)
        axes[-1].set_xlabel("time, in the unit of the costs")
        _legend(figure, reports)
        if title:
            figure.suptitle(title, fontweight="bold", fontsize=12, parse_math=False)
        return figure


def _units(report: Report) -> float:
    """How many of its shortest actions fit in the makespan."""
    lengths = (
        end - start
        for row in zip(report.starts, report.ends, strict=True)
        for start, end in zip(*row, strict=True)
    )
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return report.makespan / shortest


def _timeline(axis: Axes, report: Report, inches: float) -> None:
    """One report."""
    schedule = report.schedule
    ranks = range(schedule.num_ranks)
    points = 72 * inches / (report.makespan or 1.0)  # per unit of time
    for rank in ranks:
        row = (rank - HEIGHT / 2, HEIGHT)
        axis.broken_barh([(0, report.makespan)], row, facecolor=IDLE, linewidth=0)
        for (kind, chunk), boxes in _boxes(report, rank).items():
            hatch = HATCHES[chunk % len(HATCHES)]
            style: dict[str, Any] = {
                "facecolor": COLOURS[kind],
                "edgecolor": "white",
                "linewidth": 0.6,
            }
            axis.broken_barh([(left, width) for left, width, _ in boxes], row, hatch=hatch, **style)
            for left, width, label in boxes:
                size = min(8.0, 1.5 * points * width / (len(label) + 0.4))
                if size >= SMALLEST:
                    _label(axis, left + width / 2, rank, label, size, kind)
    axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.set_ylim(schedule.num_ranks - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(_heading(report), loc="left", fontsize=10, parse_math=False)


def _boxes(report: Report, rank: int) -> dict[tuple[Kind, int], list[tuple[float, float, str]]]:
    """(left, width, label) of the actions of a rank, by kind and chunk."""
    chunk_of = report.schedule.chunk_of
    boxes: dict[tuple[Kind, int], list[tuple[float, float, str]]] = {}
    order, starts, ends = report.schedule.orders[rank], report.starts[rank], report.ends[rank]
    for action, start, end in zip(order, starts, ends, strict=True):
        same = boxes.setdefault((action.kind, chunk_of[action.stage]), [])
        same.append((start, end - start, str(action.microbatch)))
    return boxes


def _label(axis: Axes, x: float, y: float, text: str, size: float, kind: Kind) -> None:
    """A microbatch in its box, with a rim that keeps hatching away from it."""
    from matplotlib.patheffects import withStroke  # noqa: PLC0415  optional

    rim = [withStroke(linewidth=2, foreground=COLOURS[kind])]
    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "path_effects": rim}
    axis.text(x, y, text, size=size, color=INK[kind], **style)


def _heading(report: Report) -> str:
    schedule = report.schedule
    clock = report.clock if report.pattern is None else f"{report.clock}, {report.pattern} ticks"
    return (
        f"{schedule.name}   S={schedule.num_ranks} K={schedule.num_stages} "
        f"M={schedule.num_microbatches}   {clock}   bubble {100 * report.bubble_rate:.1f}%   "
        f"makespan {report.makespan:.6g}"
    )


def _kinds(reports: Sequence[Report]) -> list[Kind]:
    """The kinds that occur, in the order of `KINDS`."""
    found = {a.kind for report in reports for order in report.schedule.orders for a in order}
    return [kind for kind in KINDS if kind in found]


def _legend(figure: Figure, reports: Sequence[Report]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415  optional

    handles = [Patch(color=COLOURS[k], label=f"{k}  {NAMES[k]}") for k in _kinds(reports)]
    handles.append(Patch(color=IDLE, label="idle"))
    chunks = max(r.schedule.num_stages // r.schedule.num_ranks for r in reports)
    for chunk in range(1, min(chunks, len(HATCHES))):
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": "grey", "hatch": HATCHES[chunk]}
        handles.append(Patch(label=f"chunk {chunk}", **style))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
