"""The two engines beside each other: ``python -m bench.engines``.

One timetable, run as one program in which all ranks keep step (scan), and as a program for each
action (programs), in turn. Predicted is the clock of one over the clock of the other (event over
lockstep), with costs that `pipe.calibrate` measures before. Equal stages have little to gain,
chunks of unlike cost much; where one rank is the slowest in every slot, as with a large head, both
clocks agree. Small products keep one core, so that two ranks have one each. Letters: S ranks, V
chunks, M microbatches.

Dispatch is what a step of tiny stages takes in Python: microseconds of the calling thread for each
action, and for each leaf of a stage that is given to its rank. Then compilation of such stages is
compared: it must not grow with M.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.measure import in_turns, seconds

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import CalibrationError, Pipeline
from pipeline.core.programs.finish import JoinedFinish
from pipeline.training.batches import Padded, masked
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from schedules import Costs, Schedule, simulate
from schedules.clocks.lockstep import fastest
from schedules.core.action import KINDS

RANKS, MICROBATCHES, ROWS, CONTEXT = 2, 16, 4, 128
ENGINES = "scan", "programs"
SIZES = Sizes(layers=4, width=256, heads=4, context=CONTEXT)
WIDER = Sizes(layers=4, width=384, heads=6, context=CONTEXT)
WORDS = 8192


SCAN, PROGRAMS = ({"engine": engine} for engine in ENGINES)


@dataclass(frozen=True)
class Case:
    """Stages, a schedule, and the two pipelines that are compared.

    Attributes:
      stages: makes the stages, of random streams.
      schedule: a family.
      head: the words of the head, 0 for none.
      images: whether the first stage runs in every second microbatch only, which has an image.
      words: the words of an embedding and a head that ranks may share, 0 for none.
      padded: whether the last rows of the batch are padding.
      sizes: S, data shards, rows and positions of a microbatch.
      options: options of both pipelines.
      pair: options of one and of the other; the row is the second over the first.
    """

    stages: Any
    schedule: str = "1f1b"
    head: int = 0
    images: bool = False
    words: int = 0
    padded: bool = False
    sizes: tuple[int, int, int, int] = (RANKS, 1, ROWS, CONTEXT)
    options: Mapping[str, Any] = field(default_factory=dict)
    pair: tuple[Mapping[str, Any], Mapping[str, Any]] = (SCAN, PROGRAMS)


class Decoder(nnx.Module):
    """Blocks of another width than the stage before has."""

    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(SIZES.width, WIDER.width, rngs=rngs)
        self.blocks = Stage(WIDER, 1, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(self.into(x))


class Vision(nnx.Module):
    """An encoder that does not run for a microbatch without an image."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = Stage(SIZES, 4, rngs)

    def __call__(self, x: dict[str, jax.Array]) -> jax.Array:
        return jax.lax.cond(x["has_image"].any(), self.blocks, jnp.zeros_like, x["image"])


class Logits(nnx.Module):
    """A head whose products are those of several blocks."""

    def __init__(self, words: int, rngs: nnx.Rngs):
        self.out = nnx.Linear(SIZES.width, words, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class Small(nnx.Module):
    """Products so small that one core computes them."""

    def __init__(self, count: int, rngs: nnx.Rngs):
        self.weights = nnx.Param(rngs.params.normal((count, 64, 64)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            product = lambda x, _: (jnp.tanh(x @ weight), None)  # noqa: E731
            return jax.lax.scan(product, x, length=40)

        return jax.lax.scan(block, x, self.weights[...])[0]


def blocks(*counts: int) -> Any:
    """Stages of so many GPT blocks each."""
    return lambda rngs: [Stage(SIZES, count, rngs) for count in counts]


def small(*counts: int) -> Any:
    return lambda rngs: [Small(count, rngs) for count in counts]


UNLIKE = 3, 1, 3, 1, 1, 3, 1, 3
LONG = Sizes(layers=4, width=128, heads=2, context=2048)
SHARED = {"vocabulary": "stage", **PROGRAMS}
NOISY = 1.15  # largest over smallest ratio of a pair of steps

CASES = {
    "equal, 1f1b": Case(blocks(2, 2)),
    "equal, eager_1f1b": Case(blocks(2, 2), "eager_1f1b"),
    "chunks of 3 1 3 1 1 3 1 3": Case(blocks(*UNLIKE), "interleaved_1f1b"),
    "the same, small products": Case(small(*UNLIKE), "interleaved_1f1b", sizes=(2, 1, 2, 64)),
    "encoder, wider decoder": Case(lambda rngs: [Stage(SIZES, 2, rngs), Decoder(rngs)]),
    "every second without an image": Case(
        lambda rngs: [Vision(rngs), Stage(SIZES, 2, rngs)], "eager_1f1b", images=True
    ),
    "a head that is the slowest": Case(blocks(2, 2), head=WORDS),
    "fsdp, gather=step": Case(
        blocks(2, 2), sizes=(2, 2, 2, CONTEXT), options={"data_parallel": "fsdp", "gather": "step"}
    ),
    "bfloat16": Case(blocks(2, 2), options={"compute_dtype": jnp.bfloat16}),
    "padding": Case(blocks(2, 2), padded=True),
    "4 slices of 2048 positions": Case(
        lambda rngs: [Stage(LONG, 1, rngs) for _ in range(4)],
        "seq1f1b",
        sizes=(4, 1, 1, 2048),
        options={"slices": 4},
    ),
    "32k words on all ranks": Case(
        blocks(2, 2), words=32768, sizes=(2, 1, 1, CONTEXT), options={"vocabulary": "stage"}
    ),
    "32k words: all ranks / last rank": Case(
        blocks(2, 2), words=32768, sizes=(2, 1, 1, CONTEXT), pair=(PROGRAMS, SHARED)
    ),
}


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside a stage."""
    return jnp.mean(jnp.square(outputs)) + jnp.mean(targets)


def make(case: Case, **options: Any) -> tuple[Pipeline, Any]:
    """The pipeline of a case, and its batch."""
    S, D, b, positions = case.sizes
    rngs, mesh = nnx.Rngs(0), make_mesh(stage=S, data=D)
    options = {"mesh": mesh, "loss_fn": mean_square, "remat": None, **case.options, **options}
    stages, rows = case.stages(rngs), MICROBATCHES * b * D
    shape = rows, positions, 64 if isinstance(stages[0], Small) else SIZES.width
    if isinstance(stages[0], Stage) and positions == LONG.context:
        shape = rows, positions, LONG.width
    inputs: Any = jax.random.normal(jax.random.key(1), shape)
    targets: Any = jnp.zeros(rows)
    if case.head:
        options["head"] = Logits(case.head, rngs)
    if case.images:
        inputs = {"image": inputs, "has_image": jnp.arange(rows) // b % 2 == 0}
    if case.words:
        options["embed"] = VocabularyEmbedding(case.words, SIZES.width, rngs=rngs)
        options["head"] = VocabularyHead(case.words, SIZES.width, rngs=rngs)
        options["loss_fn"] = CrossEntropy()
        inputs, targets = jax.random.randint(jax.random.key(1), (2, *shape[:2]), 0, case.words)
    if case.padded:
        options["loss_fn"] = masked(mean_square)
        targets = Padded(targets, (jnp.arange(rows) < rows - b).astype(jnp.float32))
    pipe = Pipeline(stages, MICROBATCHES, schedule=case.schedule, **options)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return pipe, jax.device_put((inputs, targets), everywhere)


def predict(case: Case) -> float:
    """The clock of the second engine over the clock of the first, with measured costs."""
    # What an encoder takes that runs is that of its blocks.
    shown = Case(blocks(4, 2), case.schedule) if case.images else case
    pipe, batch = make(shown, **case.pair[1])
    costs = pipe.calibrate(*batch, rounds=3, split=False).costs
    clocks = [make(shown, **options)[0].plan for options in reversed(case.pair)]
    times = [simulate(pipe.schedule, **of.clock_with(costs)).makespan for of in clocks]
    if case.images:
        times = predict_skips(pipe.schedule, costs)
    return times[0] / times[1]


def predict_skips(schedule: Schedule, costs: Costs) -> list[float]:
    """Both clocks, where the first stage takes no time in every second microbatch."""
    of_kind = costs.table(schedule.num_stages)
    durations = {
        action: 0.0
        if action.stage == 0 and action.microbatch % 2
        else float(of_kind[KINDS.index(action.kind), action.stage])
        for order in schedule.orders
        for action in order
    }
    slots = defaultdict[int, float](float)  # each takes as long as the longest of its actions
    for slot, lasts in zip(
        fastest(schedule, None, costs).ticks.times, durations.values(), strict=True
    ):
        slots[int(slot)] = max(slots[int(slot)], lasts)
    event = simulate(schedule, costs, "measured", durations=durations)
    return [event.makespan, sum(slots.values())]


def compare(case: Case, rounds: int) -> list[str]:
    """A row of the table: predicted and measured programs / scan, and compilation."""
    variants, compiled = {}, {}
    try:
        predicted = f"{predict(case):.2f}"
    except CalibrationError:  # noise: the ratio of the engines is measured without it
        predicted = "-"
    for n, options in enumerate(case.pair):
        variants[n], *compiled[n] = first_step(*make(case, **options))
    timers = {n: functools.partial(seconds, run) for n, run in variants.items()}
    taken = in_turns(timers, rounds)
    ratios = [b / a for a, b in zip(*taken.values(), strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    spread += " noisy" * (max(ratios) > NOISY * min(ratios))
    wall, cpu = (b / a for a, b in zip(*compiled.values(), strict=True))
    first, median = 1e3 * statistics.median(taken[0]), statistics.median(ratios)
    return [f"{first:.0f}", predicted, f"{median:.2f}", spread, f"{wall:.1f}", f"{cpu:.1f}"]


def first_step(pipe: Pipeline, batch: Any) -> tuple[Any, float, float]:
    """Run the first step; return the step, and the wall and CPU seconds of the first."""
    run = functools.partial(pipe.value_and_grad, *batch)
    start = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return run, time.perf_counter() - start[0], time.process_time() - start[1]


class Tiny(nnx.Module):
    """A stage of many leaves that computes next to nothing."""

    def __init__(self, leaves: int, rngs: nnx.Rngs):
        self.scales = nnx.List([nnx.Param(rngs.params.normal((8,))) for _ in range(leaves)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for scale in self.scales:
            x = x + 1e-3 * jnp.tanh(scale[...])
        return x


def tiny(S: int, V: int, M: int, leaves: int, engine: str) -> tuple[Pipeline, Any]:
    """A pipeline of tiny stages, and its batch."""
    rngs, mesh = nnx.Rngs(0), make_mesh(stage=S)
    options: dict[str, Any] = {"remat": None, "engine": engine, "loss_fn": mean_square}
    stages = [Tiny(leaves, rngs) for _ in range(S * V)]
    schedule = "1f1b" if V == 1 else "interleaved_1f1b"
    return Pipeline(stages, M, schedule=schedule, mesh=mesh, **options), (jnp.ones((M, 8)),) * 2


DISPATCH = (
    (2, 1, 64, 2),
    (2, 4, 64, 2),
    (8, 4, 16, 2),
    (8, 4, 64, 2),
    (8, 4, 16, 12),
    (8, 4, 16, 48),
)
COMPILED = (2, 1, 16, 2), (2, 1, 256, 2), (2, 4, 16, 2), (2, 4, 256, 2)


def dispatch(S: int, V: int, M: int, leaves: int, rounds: int) -> tuple[float, float]:
    """Microseconds of the calling thread for each action of a step, and for each leaf of a rank."""
    pipe, batch = tiny(S, V, M, leaves, "programs")
    jax.block_until_ready(pipe.value_and_grad(*batch))
    whole, placing, counts = list[float](), list[float](), list[int]()
    place = JoinedFinish.place

    def timed(self: JoinedFinish, given: Any) -> Any:
        start = time.thread_time()
        placed = place(self, given)
        placing.append(time.thread_time() - start)
        counts.append(len(given))
        return placed

    for _ in range(rounds):
        with mock.patch.object(JoinedFinish, "place", timed):
            start = time.thread_time()
            results = pipe.value_and_grad(*batch)
            whole.append(time.thread_time() - start)
        jax.block_until_ready(results)
    actions, parts = 2 * S * V * M, S * counts[0]
    return 1e6 * statistics.median(whole) / actions, 1e6 * statistics.median(placing) / parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each row when it is measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"some of: {', '.join(CASES)}", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each engine (7)")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}: there are {', '.join(CASES)}")
    print(
        f"S={RANKS}, M={MICROBATCHES}, d={SIZES.width}, {ROWS} x {CONTEXT} tokens a microbatch, "
        f"remat=None, jax {jax.__version__}, {platform.machine()}, medians of {given.rounds} "
        f"interleaved pairs; second / first, of most rows programs / scan; noisy: the largest "
        f"ratio is over {NOISY} times the smallest",
        flush=True,
    )
    header = ["first, ms", "clocks", "step", "from, to", "compile, wall", "CPU"]
    names = given.cases or list(CASES)
    widths = [max(map(len, CASES)), *map(len, header)]
    widths[4] = len("0.00 to 0.00 noisy")
    measured = ([name, *compare(CASES[name], given.rounds)] for name in names)
    for row in itertools.chain([["stages", *header]], measured):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)
    if given.cases:
        return
    for of in DISPATCH:
        action, leaf = dispatch(*of, given.rounds)
        print(
            "dispatch, S={} V={} M={}, {} leaves a stage: ".format(*of)
            + f"{action:.0f} us an action, {leaf:.1f} us a leaf",
            flush=True,
        )
    for of in COMPILED:
        (wall, cpu), (scan, of_scan) = (
            first_step(*tiny(*of, engine))[1:] for engine in reversed(ENGINES)
        )
        print(
            "first step, S={} V={} M={}: ".format(*of)
            + f"{wall:.1f} s, {cpu:.1f} CPU s; scan {scan:.1f}, {of_scan:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
