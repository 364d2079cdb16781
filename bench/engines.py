"""The two engines beside each other: ``python -m bench.engines``.

One timetable, run as one program in which all ranks keep step (scan), and as a program for each
action (programs), in turn. Predicted is the event clock over the lockstep clock, with costs that
`pipe.calibrate` measures before. Equal stages have little to gain, chunks of unlike cost much;
where one rank is the slowest in every slot, as with a large head, both clocks agree. Dispatch is
what a step of tiny stages takes in Python, for each action. Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.measure import in_turns, seconds

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import CalibrationError, Pipeline
from schedules import Costs, Schedule, simulate
from schedules.clocks.lockstep import fastest
from schedules.core.action import KINDS

RANKS, MICROBATCHES, ROWS, CONTEXT = 2, 16, 4, 128
ENGINES = "scan", "programs"
SIZES = Sizes(layers=4, width=256, heads=4, context=CONTEXT)
WIDER = Sizes(layers=4, width=384, heads=6, context=CONTEXT)
WORDS = 8192


@dataclass(frozen=True)
class Case:
    """Stages and a schedule.

    Attributes:
      stages: makes the stages, of random streams.
      schedule: a family.
      head: the words of the head, 0 for none.
      images: whether the first stage runs in every second microbatch only, which has an image.
    """

    stages: Any
    schedule: str = "1f1b"
    head: int = 0
    images: bool = False


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


def blocks(*counts: int) -> Any:
    """Stages of so many GPT blocks each."""
    return lambda rngs: [Stage(SIZES, count, rngs) for count in counts]


NOISY = 1.15  # largest over smallest ratio of a pair of steps

CASES = {
    "equal, 1f1b": Case(blocks(2, 2)),
    "equal, eager_1f1b": Case(blocks(2, 2), "eager_1f1b"),
    "chunks of 3 1 3 1 1 3 1 3": Case(blocks(3, 1, 3, 1, 1, 3, 1, 3), "interleaved_1f1b"),
    "encoder, wider decoder": Case(lambda rngs: [Stage(SIZES, 2, rngs), Decoder(rngs)]),
    "every second without an image": Case(
        lambda rngs: [Vision(rngs), Stage(SIZES, 2, rngs)], "eager_1f1b", images=True
    ),
    "a head that is the slowest": Case(blocks(2, 2), head=WORDS),
}


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside a stage."""
    return jnp.mean(jnp.square(outputs)) + jnp.mean(targets)


def make(case: Case, engine: Any) -> tuple[Pipeline, Any]:
    """The pipeline of a case, and its batch."""
    rngs, mesh = nnx.Rngs(0), make_mesh(stage=RANKS)
    head = Logits(case.head, rngs) if case.head else None
    options: dict[str, Any] = {"mesh": mesh, "loss_fn": mean_square, "remat": None}
    stages = case.stages(rngs)
    pipe = Pipeline(
        stages, MICROBATCHES, schedule=case.schedule, head=head, engine=engine, **options
    )
    shape = MICROBATCHES * ROWS, CONTEXT, SIZES.width
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs: Any = jax.random.normal(jax.random.key(1), shape)
    if case.images:
        inputs = {"image": inputs, "has_image": jnp.arange(shape[0]) // ROWS % 2 == 0}
    return pipe, jax.device_put((inputs, jnp.zeros(shape[0])), everywhere)


def predict(case: Case) -> float:
    """The event clock over the lockstep clock, with measured costs."""
    # What an encoder takes that runs is that of its blocks.
    pipe, batch = make(Case(blocks(4, 2), case.schedule) if case.images else case, "scan")
    costs = pipe.calibrate(*batch, rounds=3, split=False).costs
    times = [simulate(pipe.schedule, costs, clock).makespan for clock in ("event", "lockstep")]
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
    for engine in ENGINES:
        start = time.perf_counter(), time.process_time()
        pipe, batch = make(case, engine)
        variants[engine] = functools.partial(pipe.value_and_grad, *batch)
        jax.block_until_ready(variants[engine]())
        compiled[engine] = time.perf_counter() - start[0], time.process_time() - start[1]
    timers = {engine: functools.partial(seconds, run) for engine, run in variants.items()}
    taken = in_turns(timers, rounds)
    ratios = [b / a for a, b in zip(*(taken[engine] for engine in ENGINES), strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    spread += " noisy" * (max(ratios) > NOISY * min(ratios))
    wall, cpu = (b / a for a, b in zip(*(compiled[engine] for engine in ENGINES), strict=True))
    scan = 1e3 * statistics.median(taken["scan"])
    median = statistics.median(ratios)
    return [f"{scan:.0f}", predicted, f"{median:.2f}", spread, f"{wall:.1f}", f"{cpu:.1f}"]


class Tiny(nnx.Module):
    """A stage that computes next to nothing."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def dispatch(rounds: int) -> float:
    """Seconds of Python for each action of a step, until the call returns."""
    rngs, M = nnx.Rngs(0), 64
    stages, mesh = [Tiny(rngs) for _ in range(RANKS)], make_mesh(stage=RANKS)
    options: dict[str, Any] = {"remat": None, "engine": "programs", "loss_fn": mean_square}
    pipe = Pipeline(stages, M, schedule="1f1b", mesh=mesh, **options)
    x = jnp.ones((M, 8))
    jax.block_until_ready(pipe.value_and_grad(x, x))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        results = pipe.value_and_grad(x, x)
        times.append(time.perf_counter() - start)
        jax.block_until_ready(results)
    return statistics.median(times) / (2 * RANKS * M)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each row when it is measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each engine (7)")
    given = parser.parse_args(arguments)
    print(
        f"S={RANKS}, M={MICROBATCHES}, d={SIZES.width}, {ROWS} x {CONTEXT} tokens a microbatch, "
        f"remat=None, jax {jax.__version__}, {platform.machine()}, medians of {given.rounds} "
        f"interleaved pairs; programs / scan; noisy: the largest ratio is over {NOISY} times the "
        f"smallest",
        flush=True,
    )
    header = ["scan, ms", "clocks", "step", "from, to", "compile, wall", "CPU"]
    names = given.cases or list(CASES)
    widths = [max(map(len, CASES)), *map(len, header)]
    widths[4] = len("0.00 to 0.00 noisy")
    measured = ([name, *compare(CASES[name], given.rounds)] for name in names)
    for row in itertools.chain([["stages", *header]], measured):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)
    print(f"dispatch: {1e3 * dispatch(given.rounds):.2f} ms an action")


if __name__ == "__main__":
    main()
