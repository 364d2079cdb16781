"""Steps beside the lockstep clock's prediction: ``python -m bench.clock``.

The clock is given F, B, I and W of every stage, calibrated in a process of one core, a round in
every turn of the steps, and the slots that the kernel runs. To that comes what the same step takes
when every entry of its table is idle: memory that is made and cleared (much of it for gpipe, whose
stashes are many), exchanges, dispatch. Measured / predicted is wanted within .95 and 1.05 for every
family that is legal, V = 1 and 2.

Twice: S = 4 with stages that wait and do not compute (`bench.waiting`), where nothing but the
timetable decides, and S = 2 with GPT blocks, a core a rank. Cores of one machine share its memory
and its clock rate, so there each stage is calibrated while the other cores do the same.

Where the calibration contradicts itself, or is drowned in noise, nothing is compared: the reason is
printed, and the exit code is 1. Letters: S ranks, K stages, V chunks, M microbatches.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import waiting
from bench.cases import Case, calibrator, gradients_of, mean_square, reference, see_that_it_agrees
from bench.measure import SETTLED, Timer, behind_itself, interleaved, seconds, table
from bench.pinned import Elsewhere, cores

import jax  # isort: skip
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import Calibration, CalibrationError, Pipeline
from pipeline.insight.calibrate.measure import Calibrator
from pipeline.insight.calibrate.one_rank import operands_of, partial_step

ROUNDS = 5
NEAR = 0.95, 1.05
CHUNKS = 1, 2
RANKS = 2  # of CASE
CASE = Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4)
WAITING_RANKS = 4
WAITING = Case("waits", "halves", 8, 64, microbatches=8, rows=1)


def families(ranks: int, microbatches: int) -> list[schedules.Schedule]:
    """Every family that can run, each timetable once."""
    found: list[schedules.Schedule] = []
    for chunks in CHUNKS:
        for name in schedules.names():
            sizes = {"num_ranks": ranks, "num_stages": chunks * ranks}
            try:
                one = schedules.build(name, num_microbatches=microbatches, **sizes)
            except schedules.ScheduleError:
                continue
            if all(one.orders != other.orders for other in found):
                found.append(one)
    return found


def pipelines(
    case: Case, remat: Any, ranks: int, only: list[tuple[str, int]] | None = None
) -> dict[str, tuple[Pipeline, Any]]:
    """Every family (or those named, with their V), checked, and its step."""
    wanted, mesh = reference(case), make_mesh(stage=ranks)
    batch = jax.device_put(case.data(), jax.sharding.NamedSharding(mesh, P()))
    found = {}
    for schedule in families(ranks, case.microbatches):
        if only is not None and (schedule.name, schedule.num_stages // ranks) not in only:
            continue
        pipe = Pipeline(
            case.stages(schedule.num_stages),
            case.microbatches,
            schedule=schedule,
            mesh=mesh,
            loss_fn=mean_square,
            remat=remat,
        )
        step = functools.partial(pipe.value_and_grad, *batch)
        loss, grads = step()
        name = f"{schedule.name}, V={schedule.num_stages // ranks}"
        see_that_it_agrees(name, (loss, gradients_of(pipe, grads)), wanted)
        found[name] = pipe, step
    return found


@dataclass(frozen=True)
class Asked:
    """Steps to be measured: of a case, with one remat.

    Attributes:
      waits: whether its stages wait.
      remat: None or "stage".
      small: tiny sizes, to see that it runs.
    """

    waits: bool
    remat: str | None
    small: bool

    @property
    def case(self) -> Case:
        """The model and its batch."""
        case = WAITING if self.waits else CASE
        return case.small() if self.small else case

    @property
    def ranks(self) -> int:
        """S."""
        return WAITING_RANKS if self.waits else RANKS

    def __str__(self) -> str:
        stages = "stages that wait" if self.waits else "GPT"
        return f"{stages}, S={self.ranks}, remat={self.remat}"


@dataclass(frozen=True)
class Found:
    """Results for a family: its slots, and seconds.

    Attributes:
      of: what was asked.
      name: of the family, and its V.
      slots: of a tick, that ran.
      makespan: of the clock.
      empty: of a step whose entries are idle.
      taken: measured.
      costs: calibrated, as text.
    """

    of: str
    name: str
    slots: str
    makespan: float
    empty: float
    taken: float
    costs: str

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return self.taken / (self.makespan + self.empty)

    @property
    def is_near(self) -> bool:
        """True if the ratio is near 1."""
        return NEAR[0] <= self.ratio <= NEAR[1]


def predict(pipe: Pipeline, costs: schedules.Costs) -> tuple[str, float]:
    """The slots that the kernel runs, and the makespan of a step in seconds."""
    plan = pipe.plan
    # Chosen for the costs of the plan, whatever those turn out to be.
    slots = str(schedules.simulate(pipe.schedule, **plan.clock).pattern)
    report = schedules.simulate(pipe.schedule, costs, "lockstep", pattern=slots, **plan.sends)
    return slots, report.makespan


class Calibrating(ExitStack):
    """Calibrations of several things, a round of each in every turn, by processes of one core.

    A machine gets slower and quicker by the minute. Calibrated before or after the steps that they
    are compared with, stages are found up to 10% too cheap or too dear.

    Args:
      make: a module-level function, or a `functools.partial` of one: the calibrators, by name.
      busy: whether every other core does the same meanwhile, as in a step.
    """

    def __init__(self, make: Callable[[], Mapping[Any, Calibrator]], *, busy: bool) -> None:
        super().__init__()
        several = functools.partial(_Several, make)
        self._all = [Elsewhere(several, core) for core in (cores() if busy else cores()[:1])]

    def __enter__(self) -> Self:
        super().__enter__()
        for one in self._all:
            self.enter_context(one)
        return self

    def turn(self) -> float:
        """A round of each; a `bench.measure.Timer`, whose seconds say nothing."""
        for one in self._all:
            one.begin("turn")
        for one in self._all:
            one.end()
        return 0.0

    def conclude(self, rounds: int) -> dict[Any, Calibration]:
        """Conclusions of the first process from the last rounds.

        Raises:
          CalibrationError: the times are noise, or they contradict each other.
        """
        found: dict[Any, Calibration] = self._all[0].call("conclude", rounds)
        return found


class _Several:
    def __init__(self, make: Callable[[], Mapping[Any, Calibrator]]) -> None:
        self._each = dict(make())

    def turn(self) -> None:
        for one in self._each.values():
            one.turn()

    def conclude(self, rounds: int) -> dict[Any, Calibration]:
        return {name: one.conclude(rounds) for name, one in self._each.items()}


def run(some: Sequence[Asked], rounds: int) -> list[Found]:
    """Each family, predicted and measured, each printed to stderr when it is measured.

    What noise decides is left out, with a line to stderr that says so.
    """
    found = []
    for asked in some:
        try:
            found += (measured := _run(asked, rounds))
            print(tables(measured), file=sys.stderr, flush=True)
        except CalibrationError as error:
            print(f"left out, {error}", file=sys.stderr, flush=True)
    return found


def _run(asked: Asked, rounds: int) -> list[Found]:
    calibrators = functools.partial(_calibrators, asked)
    pipes = pipelines(asked.case, asked.remat, asked.ranks)
    timers: dict[tuple[str, str], Timer] = {}
    with Calibrating(calibrators, busy=not asked.waits) as calibrating:
        for name, (pipe, step) in pipes.items():
            timers[name, "step"] = behind_itself(functools.partial(seconds, step))
            idle = jnp.zeros(pipe.plan.training.op.shape, bool)
            operands = operands_of(pipe, *step.args)
            empty = functools.partial(partial_step(pipe.plan, operands), idle)
            timers[name, "empty"] = behind_itself(functools.partial(seconds, empty))
        timers["", "stages"] = calibrating.turn
        taken = interleaved(timers, rounds, SETTLED)
        try:
            measured = calibrating.conclude(rounds)
        except CalibrationError as error:
            raise CalibrationError(f"{asked}: {error}") from error
    found = []
    for name, (pipe, _) in pipes.items():
        calibration = measured[pipe.plan.num_chunks]
        slots, makespan = predict(pipe, calibration.costs)
        times = makespan, taken[name, "empty"], taken[name, "step"]
        found.append(Found(str(asked), name, slots, *times, str(calibration)))
    return found


def _calibrators(asked: Asked) -> dict[int, Calibrator]:
    """By V."""
    case, S = asked.case, asked.ranks
    return {V: calibrator(case, V * S, asked.remat, S) for V in CHUNKS}


# --- text


def conclusion(found: Sequence[Found]) -> str:
    """The conclusion for a reader."""
    lines = []
    for of in dict.fromkeys(one.of for one in found):
        own = [one for one in found if one.of == of]
        farthest = max(own, key=lambda one: abs(one.ratio - 1))
        lines.append(
            f"{of}: {sum(one.is_near for one in own)} of {len(own)} steps took {NEAR[0]} to "
            f"{NEAR[1]} of what the lockstep clock says, their median "
            f"{statistics.median(one.ratio for one in own):.3f}; the farthest "
            f"{farthest.ratio:.3f} ({farthest.name})."
        )
    return "\n".join(lines)


def tables(found: Sequence[Found]) -> str:
    """A table for each thing that was asked, and by what costs it was predicted."""
    parts = []
    for of in dict.fromkeys(one.of for one in found):
        own = [one for one in found if one.of == of]
        rows = [
            [
                one.name,
                one.slots,
                *(f"{1e3 * t:.0f}" for t in (one.makespan, one.empty, one.taken)),
                f"{one.ratio:.3f}",
            ]
            for one in own
        ]
        header = [of, "slots", "clock ms", "+ empty", "measured ms", "ratio"]
        parts += [table(header, rows), *dict.fromkeys(one.costs for one in own)]
    return "\n\n".join(parts)


def main() -> None:
    """Print conclusion and tables."""
    parser = waiting.parser_of("bench.clock", __doc__, ROUNDS)
    parser.add_argument("--remat", choices=["None", "stage", "both"], default="both")
    parser.add_argument("--stages", choices=["wait", "gpt", "both"], default="both")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    remats = {"None": [None], "stage": ["stage"], "both": [None, "stage"]}[options.remat]
    kinds = {"wait": [True], "gpt": [False], "both": [True, False]}[options.stages]
    asked = [Asked(waits, remat, options.small) for waits in kinds for remat in remats]
    try:
        if waiting.is_elsewhere(options, Asked, run):
            return
        there = [one for one in asked if one.waits]
        found: list[Found] = []
        if there:
            each = waiting.elsewhere("bench.clock", there, WAITING_RANKS, options.rounds)
            found += [Found(**one) for one in each]
        found += run([one for one in asked if not one.waits], options.rounds)
    except RuntimeError as error:
        sys.exit(f"no comparison: {error}")
    if not found:
        sys.exit("no comparison: noise decides all")
    where = (
        f"{waiting.machine(len(os.sched_getaffinity(0)))}; medians of {options.rounds} "
        f"interleaved turns\n{WAITING.text()}\n{CASE.text()}"
    )
    records = [asdict(one) | {"ratio": one.ratio} for one in found]
    waiting.show(options, conclusion(found), where, ("steps", records), tables(found))


if __name__ == "__main__":
    main()
