"""Efficiency against the number of microbatches: ``python -m bench.bubble``.

Efficiency is the time in which a rank does what it must over the time of the step. Of it there is

- what the formula of GPipe and 1F1B says, M / (M + S - 1);
- what two clocks say of a timetable with F = 1 and B = 2 (I = W = 1): the event clock, in which a
  rank waits for its messages alone, and lockstep, in which ranks meet at the end of every slot of
  the ticks that run, all of them as on virtual CPU devices, or with ``--partners`` those that
  exchange something, as on GPUs and TPUs;
- what `Pipeline.measure` says on virtual devices of this machine: the work of the busiest rank over
  the step. With fewer cores than ranks, stages wait and do not compute (`bench.waiting`), which
  shows exchanges, loops and dispatch, but nothing of copies and of memory.

Numbers that cannot be right end it: an efficiency above 1, a clock below the one that waits more, a
formula that its own families do not meet, or a step quicker than the event clock allows.
Letters: S ranks, V chunks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import step
from bench.measure import ContradictionError, table
from bench.waiting import FORWARD, Halves, elsewhere, is_elsewhere, machine, show

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from schedules import Costs, ScheduleError, simulate

RANKS = (2, 4, 8)
MICROBATCHES = (4, 8, 16, 32, 64, 128)
MEASURED = (4, 8, 16, 32)
FAMILIES = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b:2",
    "interleaved_1f1b:4",
    "zb_h1",
    "zb_v:2",
)
BY_FORMULA = ("gpipe", "1f1b", "eager_1f1b")
NOISE = 0.05  # of a measurement, where its own spread is less
ROUNDED = 1e-9
WIDTH = 64  # of stages that wait


@dataclass(frozen=True)
class Point:
    """Efficiencies of a family at one size.

    Attributes:
      family: its name.
      ranks: S.
      chunks: V.
      microbatches: M.
      formula: M / (M + S - 1).
      event: under the event clock.
      lockstep: with the slots that run.
      measured: of a step on this machine; None if it was not measured.
      noise: the spread of that, relative.
      waits: whether its stages waited, for want of cores.
    """

    family: str
    ranks: int
    chunks: int
    microbatches: int
    formula: float
    event: float
    lockstep: float
    measured: float | None = None
    noise: float = 0.0
    waits: bool = False

    @property
    def name(self) -> str:
        """With its chunks, where they are several."""
        return self.family + f", V={self.chunks}" * (self.chunks > 1)


def clocked(wanted: str, ranks: int, microbatches: int, *, partners: bool) -> Point | None:
    """Bubbles of a family by the clocks, ``name`` or ``name:V``; None if it has no such size."""
    family, _, given = wanted.partition(":")
    chunks = int(given or 1)
    sizes = {"num_ranks": ranks, "num_microbatches": microbatches, "num_stages": chunks * ranks}
    try:
        one = schedules.build(family, **sizes)
    except ScheduleError:
        return None
    event = simulate(one, Costs()).against_ideal
    lockstep = simulate(one, Costs(), "lockstep", partners=partners).against_ideal
    formula = microbatches / (microbatches + ranks - 1)
    return Point(family, ranks, chunks, microbatches, formula, event, lockstep)


def measure(points: Sequence[Point], rounds: int, *, waits: bool = False) -> list[Point]:
    """Efficiencies by `Pipeline.measure`, of GPT blocks, or of stages that wait."""
    found = []
    for point in points:
        stages = step.make_stages(point.ranks, point.chunks)
        batch = step.data(point.microbatches)
        if waits:
            rngs, count = nnx.Rngs(0), point.chunks * point.ranks
            stages = [Halves(WIDTH, FORWARD / point.chunks, rngs) for _ in range(count)]
            batch = (jnp.ones((point.microbatches, WIDTH)),) * 2
        mesh, loss_fn = make_mesh(stage=point.ranks), step.mean_square
        options = {"schedule": point.family, "mesh": mesh, "loss_fn": loss_fn, "remat": None}
        taken = Pipeline(stages, point.microbatches, **options).measure(*batch, steps=rounds)
        for note in taken.notes:
            print(f"{point.name}, M={point.microbatches}: {note}", file=sys.stderr)
        noise = max(NOISE, _spread(taken.steps), _spread(taken.works))
        found.append(replace(point, measured=taken.efficiency, noise=noise, waits=waits))
    return found


def _spread(times: Sequence[float]) -> float:
    """Relative distance of times from their median."""
    middle = statistics.median(times)
    return max(abs(time - middle) for time in times) / middle


def see_that_they_make_sense(points: Iterable[Point]) -> None:
    """See that efficiencies are possible, and in the order that follows from what they count.

    Raises:
      ContradictionError: they are not.
    """
    for point in points:
        at = f"{point.name}, S={point.ranks}, M={point.microbatches}"
        shown = {"formula": point.formula, "event": point.event, "lockstep": point.lockstep}
        for name, value in shown.items():
            if not 0 < value <= 1 + ROUNDED:
                raise ContradictionError(
                    f"{at}: efficiency {value:.4f} ({name}) is not within 0 and 1"
                )
        if point.lockstep > point.event + ROUNDED:
            raise ContradictionError(
                f"{at}: lockstep {point.lockstep:.4f} is above the event clock's "
                f"{point.event:.4f}, in which ranks wait for less"
            )
        if point.family in BY_FORMULA and abs(point.event - point.formula) > ROUNDED:
            raise ContradictionError(
                f"{at}: the event clock says {point.event:.4f}, and M / (M + S - 1) is "
                f"{point.formula:.4f}"
            )
        if point.measured is not None and point.measured > point.event * (1 + point.noise):
            raise ContradictionError(
                f"{at}: measured {point.measured:.3f}, better than the event clock's "
                f"{point.event:.3f} by more than the noise of {point.noise:.0%}: the step does not "
                f"do all of its work, or the machine is not quiet; see bench.step, or give more "
                f"--rounds"
            )


def conclusion(points: Sequence[Point], *, partners: bool) -> str:
    """The conclusion, in two lines."""
    ranks = max(point.ranks for point in points)
    counts = sorted({point.microbatches for point in points if point.ranks == ranks})
    count = min(counts, key=lambda m: abs(m - 4 * ranks))
    here = [one for one in points if one.ranks == ranks and one.microbatches == count]
    best, who = max(here, key=lambda one: one.event), "partners" if partners else "all ranks"
    clocks = (
        f"S={ranks}, M={count}: GPipe and 1F1B can work {best.formula:.1%} of a step, {best.name} "
        f"{best.event:.1%} ({best.lockstep:.1%} where {who} meet after every slot)."
    )
    timed = [one for one in points if one.measured is not None]
    if not timed:
        return f"{clocks}\nNothing was measured."
    timed = [one for one in timed if not one.waits] or timed
    count = max(one.microbatches for one in timed)
    timed = [one for one in timed if one.microbatches == count]
    best = max(timed, key=lambda one: one.measured or 0.0)
    return (
        f"{clocks}\nMeasured, S={best.ranks}, M={count}: {best.name} works {best.measured:.1%} "
        f"(give or take {best.noise:.0%}), where the clocks say {best.event:.1%} and "
        f"{best.lockstep:.1%}; the rest is what the kernel costs{' stages that wait' * best.waits}."
    )


def _is_behind(point: Point) -> bool:
    """True if lockstep waits for more than the event clock."""
    return point.lockstep < point.event - ROUNDED


def tables(points: Sequence[Point]) -> str:
    """For each S, families as rows, M as columns; clocks that agree share a row."""
    parts = []
    for ranks in dict.fromkeys(point.ranks for point in points):
        mine = [point for point in points if point.ranks == ranks]
        columns = sorted({point.microbatches for point in mine})
        formula = [f"{m / (m + ranks - 1):.3f}" for m in columns]
        rows = [["M / (M + S - 1)", "formula", *formula]]
        for name in dict.fromkeys(point.name for point in mine):
            by = {point.microbatches: point for point in mine if point.name == name}
            waits = any(point.waits for point in by.values())
            shown = {"event": "event", "lockstep": "lockstep", "measured": "measured"}
            if waits:
                shown["measured"] = "measured, waiting"
            if not any(map(_is_behind, by.values())):
                shown = {"event": "both clocks", "measured": shown["measured"]}
            for kind, said in shown.items():
                values = [getattr(by[m], kind) if m in by else None for m in columns]
                if any(value is not None for value in values):
                    cells = ["" if value is None else f"{value:.3f}" for value in values]
                    rows.append([name if kind == "event" else "", said, *cells])
        parts.append(table([f"S={ranks}", "efficiency", *(f"M={m}" for m in columns)], rows))
    return "\n\n".join(parts)


def plot(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Efficiency over M, one panel for each S."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    groups = list(dict.fromkeys(point.ranks for point in points))
    names = list(dict.fromkeys(point.name for point in points))
    colours = {name: f"C{n}" for n, name in enumerate(names)}
    banded = [one.name for one in points if one.family in BY_FORMULA and one.chunks == 1]
    figure = Figure(figsize=(1.5 + 4.2 * len(groups), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, ranks in zip(panels, groups, strict=True):
        mine = [point for point in points if point.ranks == ranks]
        columns = sorted({point.microbatches for point in mine})
        axes.plot(columns, [m / (m + ranks - 1) for m in columns], color="0.75", linewidth=5)
        for name, colour in colours.items():
            by = [point for point in mine if point.name == name]
            m = [point.microbatches for point in by]
            if name not in banded:  # whose line is the band
                axes.plot(m, [point.event for point in by], color=colour)
            if any(map(_is_behind, by)):
                axes.plot(m, [point.lockstep for point in by], color=colour, linestyle=":")
            timed = [point for point in by if point.measured is not None]
            dots = [point.measured for point in timed]
            face = "white" if any(point.waits for point in timed) else colour
            style: dict[str, Any] = {"color": colour, "markersize": 5, "markerfacecolor": face}
            axes.plot([point.microbatches for point in timed], dots, "o", **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(columns, [str(m) for m in columns])
        axes.set(title=f"S = {ranks} ranks", xlabel="M, microbatches", ylim=(0, 1.02))
        axes.grid(axis="y", color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency: work / time of the step")
    band = ", ".join(["M / (M + S - 1)", *dict.fromkeys(banded)])
    handles = [Line2D([], [], color="0.75", linewidth=5, label=band)]
    handles += [
        Line2D([], [], color=colour, label=name)
        for name, colour in colours.items()
        if name not in banded
    ]
    behind = dict.fromkeys(point.name for point in points if _is_behind(point))
    handles += [
        Line2D([], [], color=colours[name], linestyle=":", label=f"{name} in lockstep")
        for name in behind
    ]
    dot: dict[str, Any] = {"color": "black", "marker": "o", "linestyle": ""}
    handles += [
        Line2D([], [], label=name, **dot | {"color": colours[name]})
        for name in dict.fromkeys(banded)
        if any(point.name == name and point.measured is not None for point in points)
    ]
    if any(point.measured is not None and not point.waits for point in points):
        handles.append(Line2D([], [], label="measured", **dot))
    if any(point.waits for point in points):
        label = "measured, stages that wait"
        handles.append(Line2D([], [], label=label, markerfacecolor="white", **dot))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    lines = [textwrap.fill(line, int(13 * figure.get_figwidth())) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=10)
    figure.savefig(path, dpi=160)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.bubble",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    counts: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument("--ranks", default=list(RANKS), help="S (2 4 8)", **counts)
    parser.add_argument("--microbatches", default=list(MICROBATCHES), help="M (4 to 128)", **counts)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="name or name:V")
    parser.add_argument("--partners", action="store_true", help="lockstep of those that exchange")
    parser.add_argument(
        "--measure",
        default=list(MEASURED),
        help="M that are run (4 to 32); none for none",
        **counts,
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs per variant (3)")
    parser.add_argument("--waiting", type=int, metavar="ROUNDS", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON in the place of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, .png or .svg")
    return parser.parse_args()


def with_steps(points: Sequence[Point], cores: int, options: argparse.Namespace) -> list[Point]:
    """The points, measured where that was asked for."""
    wanted = [point for point in points if point.microbatches in options.measure]
    blocks, free = len(step.make_stages(1)[0].blocks), min(cores, jax.device_count())
    computing = [one for one in wanted if one.ranks <= free and blocks % one.chunks == 0]
    waiting = [one for one in wanted if one.ranks > free]
    found = measure(computing, options.rounds) if computing else []
    if waiting:
        devices = max(point.ranks for point in waiting)
        there = elsewhere("bench.bubble", waiting, devices, options.rounds)
        found += [Point(**one) for one in there]
    timed = dict(zip([*computing, *waiting], found, strict=True))
    return [timed.get(point, point) for point in points]


def main() -> None:
    """Print conclusion and tables."""
    options = parsed()
    if is_elsewhere(options, Point, functools.partial(measure, waits=True)):
        return
    points = [
        point
        for ranks in options.ranks
        for family in options.families
        for m in options.microbatches
        if (point := clocked(family, ranks, m, partners=options.partners)) is not None
    ]
    if not points:
        sys.exit("no family can have such sizes; see python -m schedules compare")
    cores = len(os.sched_getaffinity(0))
    points = with_steps(points, cores, options)
    try:
        see_that_they_make_sense(points)
    except ContradictionError as error:
        sys.exit(f"nonsense: {error}")
    said = conclusion(points, partners=options.partners)
    where = (
        f"{machine(cores)}; measured: GPT blocks as in bench.step, or waits of "
        f"{1e3 * FORWARD:.0f} ms a rank for F, I and W; remat=None, medians of {options.rounds} "
        f"steps"
    )
    if options.plot:
        plot(points, options.plot, title=said)
    show(options, said, where, ("points", list(map(asdict, points))), tables(points))


if __name__ == "__main__":
    main()
