"""Predicted steps beside measured ones: ``python -m bench.fidelity``.

Each model is calibrated once for each number of stages and each remat, in a process of one core
while the other does the same, as in a step, a round of it in every turn of its steps; so is an
exchange between the ranks. From that alone, with the slots that the kernel runs, follows what a
step takes of every schedule and number of microbatches: the lockstep clock's makespan, what the
calibration found that a step takes beside its actions, and, where temporaries are predicted that no
heap of a thread can hold, the time of their pages, which are new in every step (docs/kernel.md); a
calibration's own are not counted. A step is timed right behind itself, as in training: behind one
of another pipeline it pays for what that gives back (`bench.measure.behind_itself`). There are two
cores: S = 1 runs on one, S = 2 on both, and S = 4 has stages that wait and do not compute
(`bench.waiting`).

It ends with the reason where numbers contradict each other: a calibration that does, pipelines of
one model with other losses, a step quicker than its busiest rank's work, or a machine that is not
as quick afterwards as it was. Letters: S ranks, K stages, V = K / S chunks, M microbatches.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import waiting
from bench.calibrating import Calibrating
from bench.cases import Layers, calibrator_of, mean_square
from bench.clock import predict
from bench.measure import (
    SETTLED,
    ContradictionError,
    Timer,
    behind_itself,
    in_turns,
    seconds,
    table,
    touch_seconds,
)
from bench.pinned import Builders, Pinned, call

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from examples.gpt import Embed, Head, Sizes, Stage, loss_fn
from pipeline import Calibration, CalibrationError, Pipeline
from pipeline.insight.calibrate.measure import EXCHANGES, Calibrator, exchanges
from pipeline.insight.forecast import traffic
from pipeline.insight.forecast.bytes import MemoryPrediction
from pipeline.insight.forecast.bytes import predict as predict_bytes
from schedules import ScheduleError, simulate

ROUNDS = 9
MEDIAN, WORST = 0.03, 0.08  # wanted, of errors
DRIFT = 0.05  # between the first and the last turn of one rank's work
QUICKER = 0.10  # that a step may be than its busiest rank's work, for noise
SAME = 1e-4  # of losses, relative
HEAP = 2**26  # bytes of the largest that glibc makes for a thread (malloc/arena.c)
ROWS, CONTEXT, WIDTH, LAYERS, HEADS = 4, 96, 256, 4, 4
MLP_ROWS, MLP_WIDTH = 128, 512
WAIT = 0.006  # seconds of F, I and W of a stage that waits


@dataclass(frozen=True)
class Config:
    """A step that is predicted and measured.

    Attributes:
      model: a name of `MODELS`.
      stages: K.
      ranks: S.
      schedule: its name.
      microbatches: M.
      remat: None or "stage".
    """

    model: str
    stages: int
    ranks: int
    schedule: str
    microbatches: int
    remat: str | None

    @property
    def key(self) -> tuple[str, int, str | None]:
        """Key of the model, which is calibrated once."""
        return self.model, self.stages, self.remat

    def __str__(self) -> str:
        chunks = self.stages // self.ranks
        return (
            f"{self.model}, S={self.ranks}, V={chunks}, M={self.microbatches}, {self.schedule}, "
            f"remat={self.remat}"
        )


@dataclass(frozen=True)
class Step:
    """Seconds of a configuration.

    Attributes:
      config: which.
      slots: of a tick, that ran.
      clock: the clock's makespan.
      beside: what the calibration found beside actions, but for pages that were new to it.
      fresh: what pages of memory take that are new in every step.
      times: of each turn.
    """

    config: Config
    slots: str
    clock: float
    beside: float
    fresh: float
    times: Sequence[float]

    @property
    def taken(self) -> float:
        """The median."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """The median distance from it."""
        return statistics.median(abs(t - self.taken) for t in self.times)

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return (self.clock + self.beside + self.fresh) / self.taken - 1


# --- models


def _gpt(blocks: Sequence[int]) -> Any:
    rngs, sizes = nnx.Rngs(0), Sizes(LAYERS, WIDTH, HEADS, CONTEXT)
    return [Stage(sizes, count, rngs) for count in blocks]


def _vectors(shape: tuple[int, ...], microbatches: int) -> tuple[jax.Array, jax.Array]:
    whole = (microbatches * shape[0], *shape[1:])
    x, t = (jax.random.normal(jax.random.key(seed), whole) for seed in (1, 2))
    return x, t


def _equal(stages: int, microbatches: int) -> dict[str, Any]:
    data = _vectors((ROWS, CONTEXT, WIDTH), microbatches)
    return {"stages": _gpt([LAYERS // stages] * stages), "loss_fn": mean_square, "data": data}


def _unlike(stages: int, microbatches: int) -> dict[str, Any]:
    counts = [1] + [LAYERS // stages] * (stages - 2) + [2 * LAYERS // stages - 1]
    return _equal(stages, microbatches) | {"stages": _gpt(counts)}


def _head(stages: int, microbatches: int) -> dict[str, Any]:
    rngs, sizes = nnx.Rngs(1), Sizes(LAYERS, WIDTH, HEADS, CONTEXT)
    shape = (microbatches * ROWS, CONTEXT)
    x, t = (jax.random.randint(jax.random.key(seed), shape, 0, 256) for seed in (1, 2))
    ends = {"embed": Embed(sizes, rngs), "head": Head(sizes, rngs), "loss_fn": loss_fn}
    return {"stages": _gpt([LAYERS // stages] * stages), "data": (x, t), **ends}


def _mlp(stages: int, microbatches: int) -> dict[str, Any]:
    rngs = nnx.Rngs(0)
    layers = [Layers(MLP_WIDTH, LAYERS // stages, rngs) for _ in range(stages)]
    data = _vectors((MLP_ROWS, MLP_WIDTH), microbatches)
    return {"stages": layers, "loss_fn": mean_square, "data": data}


def _waits(stages: int, microbatches: int) -> dict[str, Any]:
    return _waiting([WAIT] * stages, microbatches)


def _waits_unlike(stages: int, microbatches: int) -> dict[str, Any]:
    return _waiting([WAIT * (1.0 + (k == stages - 1)) for k in range(stages)], microbatches)


def _waiting(durations: Sequence[float], microbatches: int) -> dict[str, Any]:
    rngs, d = nnx.Rngs(0), 64
    x = jnp.ones((microbatches, d))
    stages = [waiting.Halves(d, duration, rngs) for duration in durations]
    return {"stages": stages, "loss_fn": mean_square, "data": (x, x)}


MODELS: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "gpt": _equal,
    "gpt, unlike stages": _unlike,
    "gpt, embed and head": _head,
    "mlp": _mlp,
    "waits": _waits,
    "waits, unlike stages": _waits_unlike,
}
WAITING = ("waits", "waits, unlike stages")
ALL = "stages"  # of a configuration, calibrated
MESSAGES = "messages"  # between its ranks, likewise


def configs() -> list[Config]:
    """All of them."""
    one = ("gpipe", "1f1b", "eager_1f1b", "zb_h1")
    two = ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v")
    found: list[Config] = []

    def add(
        model: str, K: int, S: int, names: Iterable[str], Ms: Iterable[int], remat: Any
    ) -> None:
        found.extend(Config(model, K, S, name, M, remat) for name in names for M in Ms)

    add("gpt", 2, 2, one, (4, 16), None)
    add("gpt", 2, 2, ("gpipe", "1f1b", "eager_1f1b", "zb_h1"), (16,), "stage")
    add("gpt", 2, 1, ("1f1b",), (8,), "stage")
    add("gpt", 4, 2, two, (16,), None)
    add("gpt", 4, 2, ("interleaved_1f1b", "zb_v"), (8,), None)
    add("gpt", 4, 2, ("interleaved_1f1b", "looped_bfs", "zb_v"), (16,), "stage")
    add("gpt, unlike stages", 2, 2, one, (16,), None)
    add("gpt, embed and head", 2, 2, one, (16,), None)
    add("mlp", 2, 2, one, (16,), None)
    add("mlp", 2, 2, ("1f1b", "eager_1f1b"), (32,), None)
    add("waits", 4, 4, ("gpipe", "1f1b", "eager_1f1b", "zb_h1"), (8,), None)
    add("waits", 8, 4, ("interleaved_1f1b", "zb_v"), (8,), None)
    add("waits, unlike stages", 4, 4, ("1f1b", "zb_h1"), (8,), None)
    return found


def pipeline_of(config: Config, devices: int | None = None) -> tuple[Pipeline, Any]:
    """The pipeline and its batch, on as many devices as ranks or as are given."""
    made = MODELS[config.model](config.stages, config.microbatches)
    batch = made.pop("data")
    mesh = make_mesh(stage=config.ranks if devices is None else devices)
    options = {"schedule": config.schedule} if devices is None else {}
    pipe = Pipeline(
        made.pop("stages"),
        config.microbatches,
        mesh=mesh,
        remat=config.remat,
        **options,
        **made,
    )
    return pipe, batch


def step_of(config: Config) -> Any:
    """A step, to be run."""
    pipe, batch = pipeline_of(config)
    return functools.partial(pipe.value_and_grad, *batch)


# --- measuring


def _calibrators(some: Sequence[Config]) -> dict[str, Calibrator]:
    """One for all of a key, with halves if one of their schedules has them."""
    one = next((config for config in some if config.schedule.startswith("zb")), some[0])
    pipe, batch = pipeline_of(replace(one, microbatches=4, ranks=1), devices=1)
    split = one.remat is None or one.schedule.startswith("zb")
    return {ALL: calibrator_of(pipe, batch, 8, one.ranks, split=split)}


def measure(
    some: Sequence[Config], rounds: int, losses: dict[Any, Any]
) -> tuple[Calibration, list[Step]]:
    """Calibrate in turns with steps: of S = 1 in a process of one core, of others here.

    Args:
      some: configurations of one key.
      rounds: turns.
      losses: of each model and batch, what was seen.

    Raises:
      CalibrationError: which model, and why.
      ContradictionError: losses of one model differ.
    """
    timers: dict[Any, Timer] = {}
    pipes: dict[Config, Pipeline] = {}
    held: dict[Config, MemoryPrediction] = {}
    alone = [config for config in some if config.ranks == 1]
    calibrators = functools.partial(_calibrators, tuple(some))
    busy = some[0].model not in WAITING
    with (
        Pinned(functools.partial(_builders, tuple(alone))) as pinned,
        Calibrating(calibrators, busy=busy) as calibrating,
    ):
        for config in some:
            pipes[config], batch = pipeline_of(config)
            if config.ranks == 1:
                timers[config] = functools.partial(pinned.seconds, str(config))
                continue
            pipe = pipes[config]
            step = functools.partial(pipe.value_and_grad, *batch)
            _see_the_loss(config, float(step()[0]), losses)
            operands = pipe.plan.facts.last
            held[config] = predict_bytes(pipe.plan, *operands)
            size = traffic.predict_traffic(pipe.plan, *operands).message
            timers[MESSAGES] = functools.partial(seconds, exchanges(pipe.plan.mesh, size))
            timers[config] = behind_itself(functools.partial(seconds, step))
        calibration = calibrating.memory()[ALL]
        large = any(map(_fresh, (calibration, *held.values())))
        touch = call(touch_seconds, busy=True) if large else 0.0
        taken = in_turns({**timers, ALL: calibrating.turn}, rounds, SETTLED)
        try:
            found = calibrating.conclude(rounds)[ALL]
        except CalibrationError as error:
            about = f"{some[0].model}, K={some[0].stages}, remat={some[0].remat}"
            raise CalibrationError(f"{about}: {error}") from error
    exchange = statistics.median(taken.get(MESSAGES, [0.0])) / EXCHANGES
    found = replace(found, costs=replace(found.costs, comm=exchange))
    steps = []
    beside = max(0.0, found.overhead - _fresh(calibration) * touch)
    for config, pipe in pipes.items():
        slots, clock = predict(pipe, found.costs)
        fresh = _fresh(held[config]) * touch if config in held else 0.0
        steps.append(Step(config, slots, clock, beside, fresh, taken[config]))
    return found, steps


def _fresh(memory: MemoryPrediction) -> int:
    """Bytes of the pages that are new in every step: all temporaries where no heap can hold them.

    XLA's CPU backend allocates them as one buffer, in the heap of the thread that runs the device,
    beside the results.
    """
    return memory.temporaries if memory.temporaries + memory.returned > HEAP else 0


def _builders(some: Sequence[Config]) -> Builders:
    return {str(config): functools.partial(step_of, config) for config in some}


def _see_the_loss(config: Config, loss: float, losses: dict[Any, Any]) -> None:
    """See that all pipelines of a model and a batch have one loss."""
    key = config.model, config.stages, config.microbatches
    other, wanted = losses.setdefault(key, (config, loss))
    if not abs(loss - wanted) <= SAME * abs(wanted):
        raise ContradictionError(
            f"the loss is {loss:.6g} with {config} and {wanted:.6g} with {other}: what computes "
            f"something else is not timed"
        )


def _see_drift(rounds: Sequence[Sequence[float]]) -> None:
    """See that the last half of the turns took as long as the first."""
    count = len(rounds[0])
    if count < 4:
        return
    half = count // 2
    ratio = statistics.median(
        statistics.median(times[-half:]) / statistics.median(times[:half]) for times in rounds
    )
    if abs(ratio - 1) > DRIFT:
        raise ContradictionError(
            f"the last {half} turns took {ratio:.2f} times as long as the first: the machine is "
            f"not as it was, so nothing follows; measure on a quiet one"
        )


def see_that_it_can_be(steps: Iterable[Step], found: Calibration) -> None:
    """See that no step is quicker than the work of its busiest rank.

    Raises:
      ContradictionError: one is.
    """
    for step in steps:
        config = step.config
        one, _ = pipeline_of(config)
        work = max(simulate(one.schedule, found.costs).work)
        if step.taken < work * (1 - QUICKER) - step.spread:
            raise ContradictionError(
                f"{config} took {1e3 * step.taken:.1f} ms, and its busiest rank alone has "
                f"{1e3 * work:.1f} ms to do by the calibration: one of the two is wrong"
            )


def run(some: Sequence[Config], rounds: int) -> list[Step]:
    """Calibrate and measure, predict, doubt: for all that share a calibration.

    Raises:
      ContradictionError: the machine got slower or quicker from turn to turn.
    """
    steps: list[Step] = []
    losses: dict[Any, Any] = {}
    for key in dict.fromkeys(config.key for config in some):
        own = [config for config in some if config.key == key]
        found, measured = measure(own, rounds, losses)
        see_that_it_can_be(measured, found)
        steps += measured
    _see_drift([step.times for step in steps])
    return steps


# --- text


def conclusion(steps: Sequence[Step]) -> str:
    """The conclusion for a reader."""
    middle = statistics.median(abs(step.error) for step in steps)
    worst = max(steps, key=lambda one: abs(one.error))
    met = middle <= MEDIAN and abs(worst.error) <= WORST
    noisy = max(step.spread / step.taken for step in steps)
    return (
        f"{len(steps)} steps predicted from calibrations: median error {middle:.1%}, worst "
        f"{worst.error:+.1%} ({worst.config}).\nWanted: {MEDIAN:.0%} and {WORST:.0%}: "
        f"{'met' if met else 'not met'}. Turns lie up to {noisy:.1%} from their median."
    )


def tables(steps: Sequence[Step]) -> str:
    """One row a configuration."""
    rows = [
        [
            step.config.model,
            str(step.config.ranks),
            str(step.config.stages // step.config.ranks),
            str(step.config.microbatches),
            str(step.config.remat),
            step.config.schedule,
            step.slots,
            *(
                f"{1e3 * t:.1f}"
                for t in (step.clock, step.beside, step.fresh, step.taken, step.spread)
            ),
            f"{step.error:+.1%}",
        ]
        for step in steps
    ]
    header = ["model", "S", "V", "M", "remat", "schedule", "slots"]
    return table([*header, "clock ms", "+ beside", "+ fresh", "measured", "+-", "error"], rows)


def main() -> None:
    """Print conclusion and table."""
    parser = waiting.parser_of("bench.fidelity", __doc__, ROUNDS)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--few", type=int, help="no more than so many steps of each model")
    options = parser.parse_args()
    start = time.perf_counter()
    some = [config for config in configs() if config.model in options.models]
    for model in options.models:
        own = [config for config in some if config.model == model]
        for config in own[options.few :] if options.few else []:
            some.remove(config)
    try:
        if waiting.is_elsewhere(options, Config, run):
            return
        here = [config for config in some if config.model not in WAITING]
        there = [config for config in some if config.model in WAITING]
        steps = run(here, options.rounds) if here else []
        if there:
            devices = max(config.ranks for config in there)
            found = waiting.elsewhere("bench.fidelity", there, devices, options.rounds)
            steps += [Step(**(one | {"config": Config(**one["config"])})) for one in found]
    except (CalibrationError, RuntimeError, ScheduleError) as error:
        sys.exit(f"no comparison: {error}")
    said = conclusion(steps)
    where = (
        f"{waiting.machine(len(os.sched_getaffinity(0)))}, one a rank; medians of "
        f"{options.rounds} turns; {time.perf_counter() - start:.0f} s in all"
    )
    found = [asdict(step) | {"taken": step.taken, "error": step.error} for step in steps]
    waiting.show(options, said, where, ("steps", found), tables(steps))


if __name__ == "__main__":
    main()
