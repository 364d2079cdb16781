"""To ten thousand chips, by the simulator: ``python -m bench.scaling --plot scaling.png``.

One batch of 1920 x 8192 tokens, data x stage 16 x tensor 8 on v5p: the more chips, the fewer
microbatches each pipeline has. What is lost on the way to 10,240 chips:

- links: the bubble and messages, if all chips share a fabric, if slices of 640 chips are joined by
  the network along `data`, or along `stage`;
- stragglers: one rank that is slow, and jitter of every action on every chip. An action of a
  tensor group lasts as long as its slowest chip's, and a step as its slowest pipeline's;
- failures: time to save, to start again and to do again what was lost, from a chip's mean time
  between failures.

What actions and messages take is `pipeline.planner`'s arithmetic, timetables and clocks are
`schedules`': nothing runs, and no accelerator is used. Beside it stand two tables of others
(`bench.published`). Numbers that cannot be right end it. Letters: S ranks, V stages on each, M
microbatches, N chips.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import published
from bench.measure import ContradictionError, table
from pipeline.planner import CHIPS, MODELS
from pipeline.planner.costs import Estimate, estimate, mfu, stage_costs
from pipeline.planner.layout import MeshLayout, PlannedJob
from schedules import Costs, Schedule, build, simulate
from schedules.core.events import run
from schedules.core.flat import flatten
from schedules.core.messages import links

BATCH, SEQ = 1920, 8192
STAGES, TENSOR, SLICE = 16, 8, 640
COUNTS = (640, 1280, 2560, 5120, 10240)
CHIP = "v5p"
INTERLEAVED = {"llama-70b": 5, "llama-405b": 4}  # V: one layer a stage, and one or two
SLOWER = (1.05, 1.1, 1.2, 1.5)
JITTER = (0.02, 0.05, 0.1)  # standard deviation of an action on one chip, in its mean
DRAWS = 400  # pipelines
HOUR = 3600.0
MTBF = (10_000.0, 50_000.0, 200_000.0)  # hours of a chip; Llama 3's are 50,677
USUAL = 1  # of those, for the summary
SAVE, RESTART = 30.0, 600.0  # seconds that a step waits for a save; until training goes on
ROUNDED = 1e-9


# --- links


@dataclass(frozen=True)
class Linked:
    """A model on so many chips, joined in one way; seconds of a step.

    Attributes:
      model: its name.
      chips: N.
      joined: "one fabric", "network along data" or "network along stage".
      family, chunks: of its schedule.
      microbatches: M.
      seconds: of the step, by what they go to.
      step: all of them.
      mfu: the model's operations over what the chips could do.
      hbm: bytes of the fullest chip.
    """

    model: str
    chips: int
    joined: str
    family: str
    chunks: int
    microbatches: int
    seconds: Mapping[str, float]
    step: float
    mfu: float
    hbm: float


def job(model: str, chips: int, slices: int = 1) -> PlannedJob:
    """A model to train."""
    chip = CHIPS[CHIP]
    return PlannedJob(MODELS[model], chip, chips, BATCH, SEQ, slices, "event", chip.efficiency)


def layout(
    model: str, chips: int, joined: str, *, interleaved: bool
) -> tuple[PlannedJob, MeshLayout]:
    """Layout of the model; M sequences on each data shard, one a microbatch."""
    data = chips // (STAGES * TENSOR)
    slices = {"one fabric": 1, "network along data": chips // SLICE, "network along stage": 4}
    count = slices[joined]
    along_stage = joined == "network along stage"
    one = MeshLayout(
        data,
        STAGES,
        TENSOR,
        data_slices=1 if along_stage else count,
        stage_slices=count if along_stage else 1,
        schedule="interleaved_1f1b" if interleaved else "1f1b",
        chunks=INTERLEAVED[model] if interleaved else 1,
        microbatches=BATCH // data,
        remat="block",
        data_parallel="zero1",
    )
    return job(model, chips, count), one


def linked(model: str, chips: int, joined: str, *, interleaved: bool) -> Linked:
    """Parts of a step's time."""
    what, one = layout(model, chips, joined, interleaved=interleaved)
    found: Estimate = estimate(what, one)
    return Linked(
        model,
        chips,
        joined,
        str(one.schedule),
        one.chunks,
        one.microbatches,
        dict(found.seconds),
        found.step,
        mfu(what, found.step),
        found.hbm,
    )


def all_linked() -> list[Linked]:
    """Both models, every count, every way to join."""
    ways = ("one fabric", "network along data", "network along stage")
    return [
        linked(model, chips, joined, interleaved=interleaved)
        for model in INTERLEAVED
        for joined in ways
        for interleaved in (False, True)
        for chips in COUNTS
        if joined != "network along data" or chips > SLICE
    ]


# --- stragglers


@dataclass(frozen=True)
class Straggling:
    """Factors by which uneven work makes a step longer.

    Attributes:
      family, chunks: of the schedule.
      microbatches: M.
      slow: [slowdown of one rank] steps over the even one, that of the worst rank.
      relieved: [slowdown] the same, with a fifth of that rank's layers shared by the others.
      group: [jitter] how long an action of a tensor group takes.
      pipeline: [jitter] a pipeline, mean.
      step: [jitter] the slowest of all pipelines, mean.
    """

    family: str
    chunks: int
    microbatches: int
    slow: tuple[float, ...]
    relieved: tuple[float, ...]
    group: tuple[float, ...]
    pipeline: tuple[float, ...]
    step: tuple[float, ...]


def scaled(costs: Costs, schedule: Schedule, factors: Sequence[float]) -> Costs:
    """Costs of stages whose ranks take [S] times as long."""
    each = [factors[rank] for rank in schedule.placement]
    table = costs.table(schedule.num_stages) * each
    f, b, i, w = table.tolist()
    return Costs(f, i, w, b=b, comm=costs.comm)


def slowed(schedule: Schedule, costs: Costs, slower: float, moved: float = 0.0) -> float:
    """A step with one rank so much slower, over the even one; of the worst rank.

    ``moved`` of its layers lie on the other ranks, in equal parts.
    """
    S, steps = schedule.num_ranks, []
    for rank in (0, S // 2, S - 1):
        factors = [1 + moved / (S - 1)] * S
        factors[rank] = slower * (1 - moved)
        steps.append(simulate(schedule, scaled(costs, schedule, factors)).makespan)
    return max(steps) / simulate(schedule, scaled(costs, schedule, [1.0] * S)).makespan


def jittered(
    schedule: Schedule, costs: Costs, jitter: float, group: int, replicas: int, draws: int
) -> tuple[float, float, float]:
    """Durations of an action of a group, of a pipeline, and of the slowest replica.

    Every action's time on every chip is log-normal about its cost, each for itself.
    """
    flat = flatten(schedule)
    lasting = costs.table(schedule.num_stages)[flat.kind, flat.stage]
    lag = costs.lags(flat.rank, links(schedule).target, schedule.num_ranks)
    rng = np.random.default_rng(0)
    sigma = math.sqrt(math.log1p(jitter**2))

    def makespan(factor: Any) -> float:
        durations = lasting * factor
        starts = np.concatenate(run(schedule, durations=durations, lag=lag))
        return float((starts + durations).max())

    even, steps, means = makespan(1.0), [], []
    for _ in range(draws):
        shape = (group, len(lasting))
        factor = rng.lognormal(-(sigma**2) / 2, sigma, shape).max(axis=0)
        means.append(float(factor.mean()))
        steps.append(makespan(factor) / even)
    # The mean of the largest of so many, whichever of the draws they are.
    order = np.sort(steps)
    below = (np.arange(1, draws + 1) / draws) ** replicas
    most = float((order * np.diff(below, prepend=0.0)).sum())
    return float(np.mean(means)), float(np.mean(steps)), most


def straggling(model: str, chips: int, *, interleaved: bool, draws: int) -> Straggling:
    """Parts of the step of a model on so many chips of one fabric."""
    what, one = layout(model, chips, "one fabric", interleaved=interleaved)
    name, V, M = str(one.schedule), one.chunks, one.microbatches
    schedule = build(name, num_ranks=STAGES, num_microbatches=M, num_stages=V * STAGES)
    # Every stage as the first but one: what ends add is no matter of stragglers.
    given = stage_costs(what, one)
    f, i, w, b = (float(getattr(given, kind)[1]) for kind in ("f", "i", "w", "b"))
    costs = Costs(f, i, w, b=b, comm=given.comm)
    group, pipeline, step = zip(
        *(jittered(schedule, costs, one, TENSOR, layout_data(chips), draws) for one in JITTER),
        strict=True,
    )
    slow = tuple(slowed(schedule, costs, slower) for slower in SLOWER)
    relieved = tuple(slowed(schedule, costs, slower, moved=0.2) for slower in SLOWER)
    return Straggling(name, V, M, slow, relieved, group, pipeline, step)


def layout_data(chips: int) -> int:
    """Number of pipelines."""
    return chips // (STAGES * TENSOR)


# --- failures


def goodput(every: float, chips: int, mtbf: float, save: float, restart: float) -> float:
    """The share of time that brings training forward.

    Failures come at random, at the same rate always, while saving and starting again too; every
    failure loses what was done since the last save. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006.

    Args:
      every: seconds of training between saves.
      chips: N; any one that fails stops all.
      mtbf: of a chip, in hours.
      save: seconds that training waits for each.
      restart: seconds from a failure until training goes on from the last save.
    """
    mean = mtbf * HOUR / chips
    with np.errstate(over="ignore"):
        whole = mean * np.exp(restart / mean) * np.expm1((every + save) / mean)
    return float(every / whole)


def best_interval(chips: int, mtbf: float, save: float, restart: float) -> float:
    """The seconds between saves that lose least."""
    mean = mtbf * HOUR / chips
    tries = math.sqrt(2 * save * mean) * np.geomspace(0.1, 10, 4001)
    return float(max(tries, key=lambda every: goodput(every, chips, mtbf, save, restart)))


def goodput_of_a_run(
    every: float, chips: int, mtbf: float, save: float, restart: float, *, saves: int
) -> float:
    """Useful share of a run in which failures are drawn, up to so many saves."""
    rng, mean = np.random.default_rng(0), mtbf * HOUR / chips
    time, done, left = 0.0, 0, float(rng.exponential(mean))
    needed = every + save
    while done < saves:
        lasts = min(needed, left)
        time, left = time + lasts, left - lasts
        if left > 0:
            done, needed = done + 1, every + save
        else:  # what was done since the last save is lost
            left, needed = float(rng.exponential(mean)), restart + every + save
    return saves * every / time


@dataclass(frozen=True)
class Failing:
    """Goodput on so many chips.

    Attributes:
      chips: N.
      mtbf: of a chip, hours.
      between: hours between failures of the job.
      every: seconds between saves that lose least.
      best: goodput with it.
      hourly: with a save an hour.
    """

    chips: int
    mtbf: float
    between: float
    every: float
    best: float
    hourly: float


def failing(chips: int, mtbf: float, save: float = SAVE, restart: float = RESTART) -> Failing:
    """The best interval between saves, and the share of time that failures leave."""
    every = best_interval(chips, mtbf, save, restart)
    best, hourly = (goodput(one, chips, mtbf, save, restart) for one in (every, HOUR))
    return Failing(chips, mtbf, mtbf / chips, every, best, hourly)


# --- all of it


@dataclass(frozen=True)
class Found:
    """Everything that is printed and drawn."""

    links: list[Linked]
    stragglers: list[tuple[int, Straggling]]  # by chips
    failures: list[Failing]

    def linked(self, model: str, chips: int, joined: str = "one fabric") -> Linked:
        """The quicker family's."""
        own = [
            one
            for one in self.links
            if (one.model, one.chips, one.joined) == (model, chips, joined)
        ]
        return min(own, key=lambda one: one.step)

    def straggler(self, chips: int, family: str) -> Straggling:
        """The jitter of a family."""
        return next(two for n, two in self.stragglers if (n, two.family) == (chips, family))


def find(draws: int) -> Found:
    """All of it."""
    ends = COUNTS[0], COUNTS[-1]
    stragglers = [
        (chips, straggling("llama-70b", chips, interleaved=interleaved, draws=few))
        for chips, few in zip(ends, (draws // 10, draws), strict=True)
        for interleaved in (False, True)
    ]
    failures = [failing(chips, mtbf) for mtbf in MTBF for chips in COUNTS]
    return Found(all_linked(), stragglers, failures)


def see_that_it_makes_sense(found: Found) -> None:
    """See that nothing gains by what it loses by.

    Raises:
      ContradictionError: something does.
    """
    for one in found.links:
        at = f"{one.model}, {one.chips} chips, {one.joined}, {one.family}"
        if not 0 < one.mfu < CHIPS[CHIP].efficiency + ROUNDED:
            raise ContradictionError(
                f"{at}: MFU {one.mfu:.3f} is not within 0 and the products' own"
            )
        near = linked(one.model, one.chips, "one fabric", interleaved=one.chunks > 1)
        if one.step < near.step * (1 - ROUNDED):
            raise ContradictionError(f"{at}: quicker than where every link is as quick")
        if one.family == "1f1b" and one.joined == "one fabric":
            _see_the_bubble(one, at)
    for chips, two in found.stragglers:
        at = f"{chips} chips, {two.family}"
        for slower, step, relieved in zip(SLOWER, two.slow, two.relieved, strict=True):
            if not 1 - ROUNDED <= step <= slower + ROUNDED or relieved > slower + ROUNDED:
                raise ContradictionError(f"{at}: a rank {slower} times slower makes it {step:.3f}")
        for group, pipeline, step in zip(two.group, two.pipeline, two.step, strict=True):
            if not 1 <= group <= pipeline * (1 + 1e-3) <= step * (1 + 2e-3):
                raise ContradictionError(f"{at}: jitter gains: {group}, {pipeline}, {step}")
    for three in found.failures:
        at = f"{three.chips} chips, {three.mtbf:.0f} hours"
        if not 0 <= three.hourly <= three.best * (1 + 1e-6) < 1:
            both = f"goodput {three.best:.3f}, and {three.hourly:.3f} with a save an hour"
            raise ContradictionError(f"{at}: {both}")
    _see_failures_drawn()


def _see_the_bubble(one: Linked, at: str) -> None:
    """1F1B of alike stages idles at least (S - 1) / (M + S - 1); ends and messages add to it."""
    least = (STAGES - 1) / (one.microbatches + STAGES - 1)
    busy = one.step - one.seconds["data"] - one.seconds["update"]
    if one.model == "llama-70b" and one.seconds["bubble"] / busy < least * 0.98:
        share = one.seconds["bubble"] / busy
        raise ContradictionError(f"{at}: bubble {share:.3f}, at least {least:.3f} is due")


def _see_failures_drawn() -> None:
    for chips in (COUNTS[0], COUNTS[-1]):
        given = chips, MTBF[USUAL], SAVE, RESTART
        every = best_interval(*given)
        said, drawn = goodput(every, *given), goodput_of_a_run(every, *given, saves=40_000)
        if abs(drawn / said - 1) > 0.01:
            raise ContradictionError(
                f"{chips} chips: goodput {said:.4f}, and {drawn:.4f} with failures"
            )


# --- text


def conclusion(found: Found) -> str:
    """The conclusion for a reader."""
    few, many = COUNTS[0], COUNTS[-1]
    lines = []
    for model in INTERLEAVED:
        one, two = found.linked(model, few), found.linked(model, many)
        jitter = found.straggler(many, two.family).step[1]
        fails = next(x for x in found.failures if (x.chips, x.mtbf) == (many, MTBF[USUAL]))
        share = two.seconds["bubble"] / two.step
        lines.append(
            f"{model}: MFU {one.mfu:.1%} on {few} chips (M={one.microbatches}), {two.mfu:.1%} on "
            f"{many} (M={two.microbatches}, bubble {share:.0%}); with 5% jitter of every action "
            f"{two.mfu / jitter:.1%}; and with a failure every {fails.between:.1f} hours "
            f"{two.mfu / jitter * fails.best:.1%}."
        )
    one = found.straggler(many, "interleaved_1f1b")
    slow, relieved = (times[SLOWER.index(1.2)] for times in (one.slow, one.relieved))
    lines.append(
        f"One chip in {many} that is 20% slow makes every step {slow - 1:.0%} longer; with a fifth "
        f"of its rank's layers on other ranks {relieved - 1:.0%}. Saving once an hour instead of "
        f"every {fails.every / 60:.0f} minutes costs {fails.best - fails.hourly:.0%} of all time."
    )
    return "\n".join(lines)


def tables(found: Found) -> str:
    """Links, stragglers, failures."""
    parts = []
    for model, V in INTERLEAVED.items():
        rows = []
        for joined in dict.fromkeys(one.joined for one in found.links):
            for chips in COUNTS:
                own = [
                    one
                    for one in found.links
                    if (one.model, one.chips, one.joined) == (model, chips, joined)
                ]
                if not own:
                    continue
                cells = [joined, str(chips), str(own[0].microbatches)]
                for one in own:
                    cells += [f"{one.step:.2f}", f"{one.seconds['bubble'] / one.step:.1%}"]
                    cells += [f"{one.mfu:.1%}", f"{one.hbm / 1e9:.0f}"]
                rows.append(cells)
        heads = ["s", "bubble", "MFU", "GB"]
        header = [model, "chips", "M", *(f"1F1B {one}" for one in heads)]
        parts.append(table([*header, *(f"V={V} {one}" for one in heads)], rows))
    rows = [
        [*_which(chips, two), f"one rank {slower:g} x", f"{a:.3f}", f"{b:.3f}"]
        for chips, two in found.stragglers
        for slower, a, b in zip(SLOWER, two.slow, two.relieved, strict=True)
    ]
    parts.append(table(["chips", "schedule", "M", "straggler", "step", "1/5 moved"], rows))
    rows = [
        [*_which(chips, two), f"{jitter:.0%}", f"{a:.3f}", f"{b:.3f}", f"{c:.3f}"]
        for chips, two in found.stragglers
        for jitter, a, b, c in zip(JITTER, two.group, two.pipeline, two.step, strict=True)
    ]
    header = ["chips", "schedule", "M", "jitter", f"{TENSOR} chips", "a pipeline", "the slowest"]
    parts.append(table(header, rows))
    rows = [
        [
            f"{one.mtbf:.0f}",
            str(one.chips),
            f"{one.between:.1f}",
            f"{one.every / 60:.1f}",
            f"{one.best:.1%}",
            f"{one.hourly:.1%}",
        ]
        for one in found.failures
    ]
    header = ["chip's MTBF, h", "chips", "job's, h", "save every, min", "goodput", "saving hourly"]
    parts.append(table(header, rows))
    return "\n\n".join(parts)


def _which(chips: int, two: Straggling) -> list[str]:
    return [str(chips), two.family, str(two.microbatches)]


def papers() -> str:
    """The tables of `bench.published`."""
    message, errors = published.fit_gpipe()
    beyond = published.beyond()
    rows = [
        [
            f"S={S}, M={M}",
            f"{published.GPIPE[S, M]:.2f}",
            f"{published.GPIPE[S, M] * (1 + error):.2f}",
            f"{error:+.1%}",
            f"{published.gpipe_at_most(S, M):.2f}" + " < table" * ((S, M) in beyond),
        ]
        for (S, M), error in errors.items()
    ]
    parts = [
        f"GPipe's table 2, Transformer-48; a message fitted at {message:.4f} of a forward pass",
        table(["", "table", "simulator", "error", "any step at most"], rows),
    ]
    rows = []
    for at in published.SETTINGS:
        cells = [f"{at.model}, S={at.S}, M={at.M}"]
        for family in published.FAMILIES:
            report = published.report_of(family, at)
            cells.append(f"{at.rates[family]:.4f} {report.bubble_rate:.4f}")
            if family in at.samples:
                ratio = published.samples_of(at, report) / at.samples[family]
                cells[-1] += f" {ratio:.2f}"
        rows.append(cells)
    parts += [
        "",
        "Zero bubble's tables 5 and 4: bubble rates there and here; samples a second, here / there",
        table(["", *published.FAMILIES], rows),
    ]
    return "\n".join(parts)


def plot(found: Found, path: Path) -> None:
    """MFU, stragglers and goodput over chips."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  optional
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    styles = {"one fabric": "-", "network along data": "--", "network along stage": ":"}
    for model, colour in zip(INTERLEAVED, ("#1f6fb4", "#c9562c"), strict=True):
        for joined, style in styles.items():
            counts = sorted({one.chips for one in found.links if one.joined == joined})
            values = [found.linked(model, n, joined).mfu for n in counts]
            panels[0].plot(counts, values, style, color=colour, label=f"{model}, {joined}")
    panels[0].set(title="Links: MFU at one batch of 16M tokens", ylabel="MFU", ylim=(0, None))
    for (chips, two), colour in zip(
        found.stragglers, ("#7fb3dc", "#f0b090", "#1f6fb4", "#c9562c"), strict=True
    ):
        name = f"{two.family}, {chips} chips"
        panels[1].plot(JITTER, two.step, "o-", color=colour, label=name)
    panels[1].set(
        title="Jitter of every action on every chip", xlabel="jitter", ylabel="step / even step"
    )
    for mtbf, colour in zip(MTBF, ("#c9562c", "#1f6fb4", "#2f8f57"), strict=True):
        own = [one for one in found.failures if one.mtbf == mtbf]
        name = f"a chip fails every {mtbf:.0f} h"
        panels[2].plot([x.chips for x in own], [x.best for x in own], color=colour, label=name)
        panels[2].plot([x.chips for x in own], [x.hourly for x in own], ":", color=colour)
    panels[2].set(title="Failures (dotted: a save an hour)", ylabel="goodput", ylim=(0, 1.02))
    for axes in panels:
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    for axes in (panels[0], panels[2]):
        axes.set_xscale("log", base=2)
        axes.set_xticks(COUNTS, [f"{n:,}" for n in COUNTS])
        axes.set_xlabel("chips")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print conclusion and tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"pipelines with jitter ({DRAWS})")
    parser.add_argument("--papers", action="store_true", help="only the tables of others")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, .png or .svg")
    options = parser.parse_args()
    if options.papers:
        print(papers())
        return
    found = find(options.draws)
    try:
        see_that_it_makes_sense(found)
    except ContradictionError as error:
        sys.exit(f"nonsense: {error}")
    said = conclusion(found)
    if options.plot:
        plot(found, options.plot)
    if options.json:
        print(json.dumps({"conclusion": said.splitlines(), **asdict(found)}, indent=2))
        return
    where = (
        f"{BATCH} x {SEQ} tokens, data x stage {STAGES} x tensor {TENSOR}, {CHIP} by the planner's "
        f"arithmetic, remat by block; save {SAVE:.0f} s, restart {RESTART / 60:.0f} min"
    )
    print(said, where, "", tables(found), "", papers(), sep="\n")


if __name__ == "__main__":
    main()
