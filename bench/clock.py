"""What the lockstep clock says a step takes, and what it takes: ``python -m bench.clock``.

The clock is given F, B, I and W of every stage, calibrated in a process of one core, and the slots
that the kernel runs. To that comes what the same step takes when every entry of its table is idle:
memory that is made and cleared (much of it for gpipe, whose stashes are many), exchanges, dispatch.
Measured / predicted is wanted within .95 and 1.05 for every family. Where the calibration
contradicts itself, or is drowned in noise, nothing is compared: the reason is printed, and the exit
code is 1. S = 2, V = 1 and 2, every family that is legal there. Letters: S ranks, K stages, V
chunks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, calibrated, gradients_of, mean_square, reference, see_that_it_agrees
from bench.measure import Timer, interleaved, seconds, table

import jax  # isort: skip
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import Calibration, CalibrationError, Pipeline
from pipeline.calibrate.measure import partial_step

RANKS = 2
NEAR = 0.95, 1.05
CASE = Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4)


def families(microbatches: int) -> list[schedules.Schedule]:
    """Every family that can run, each timetable once."""
    found: list[schedules.Schedule] = []
    for chunks in (1, 2):
        for name in schedules.names():
            sizes = {"num_ranks": RANKS, "num_stages": chunks * RANKS}
            try:
                one = schedules.build(name, num_microbatches=microbatches, **sizes)
            except schedules.ScheduleError:
                continue
            if all(one.orders != other.orders for other in found):
                found.append(one)
    return found


def pipelines(
    case: Case, remat: Any, only: list[tuple[str, int]] | None = None
) -> dict[str, tuple[Pipeline, Any]]:
    """Every family (or those named, with their V), checked, and its step."""
    wanted, mesh = reference(case), make_mesh(stage=RANKS)
    batch = jax.device_put(case.data(), jax.sharding.NamedSharding(mesh, P()))
    found = {}
    for schedule in families(case.microbatches):
        if only is not None and (schedule.name, schedule.num_stages // RANKS) not in only:
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
        name = f"{schedule.name}, V={schedule.num_stages // RANKS}"
        see_that_it_agrees(name, (loss, gradients_of(pipe, grads)), wanted)
        found[name] = pipe, step
    return found


@dataclass(frozen=True)
class Found:
    """What was found for a family: its slots, and seconds."""

    slots: str
    makespan: float
    empty: float
    taken: float

    @property
    def said(self) -> float:
        """What was predicted."""
        return self.makespan + self.empty


def predict(pipe: Pipeline, costs: schedules.Costs) -> tuple[str, float]:
    """The slots that the kernel runs, and the makespan of a step in seconds."""
    plan = pipe.plan
    # Chosen for the costs of the plan, whatever those turn out to be.
    slots = str(schedules.simulate(pipe.schedule, **plan.clock).pattern)
    report = schedules.simulate(pipe.schedule, costs, "lockstep", pattern=slots, **plan.sends)
    return slots, report.makespan


def run(case: Case, remat: Any, rounds: int) -> tuple[dict[str, Found], dict[int, Calibration]]:
    """Each family, predicted and measured; and for each V, by what costs.

    Raises:
      CalibrationError: the costs are noise, or they contradict each other.
    """
    measured = {V: calibrated(case, V * RANKS, remat, rounds) for V in (1, 2)}
    pipes = pipelines(case, remat)
    timers: dict[tuple[str, str], Timer] = {}
    for name, (pipe, step) in pipes.items():
        timers[name, "step"] = functools.partial(seconds, step)
        idle = jnp.zeros(pipe.plan.training.op.shape, bool)
        empty = functools.partial(partial_step(pipe, *step.args), idle)
        timers[name, "empty"] = functools.partial(seconds, empty)
    taken = interleaved(timers, rounds)
    found = {}
    for name, (pipe, _) in pipes.items():
        slots, makespan = predict(pipe, measured[pipe.plan.num_chunks].costs)
        found[name] = Found(slots, makespan, taken[name, "empty"], taken[name, "step"])
    return found, measured


def conclusion(found: dict[tuple[str, str], Found], case: Case, rounds: int) -> str:
    """What a reader should know, of families by remat and name."""
    ratios = {key: one.taken / one.said for key, one in found.items()}
    near = [key for key, ratio in ratios.items() if NEAR[0] <= ratio <= NEAR[1]]
    remat, name = max(ratios, key=lambda key: abs(ratios[key] - 1))
    return (
        f"{len(near)} of {len(found)} steps took .95 to 1.05 of what the lockstep clock says; the "
        f"farthest {ratios[remat, name]:.3f} ({name}, remat={remat}).\n{case.text()}, S={RANKS}, "
        f"jax {jax.__version__}, {platform.machine()}; medians of {rounds} interleaved runs"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.clock", description=__doc__)
    parser.add_argument("--remat", choices=["None", "stage", "both"], default="None")
    parser.add_argument("--rounds", type=int, default=5, help="runs per variant (5)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    case = CASE.small() if arguments.small else CASE
    remats = {"None": [None], "stage": ["stage"], "both": [None, "stage"]}
    every: dict[tuple[str, str], Found] = {}
    parts: list[str] = []
    for remat in remats[arguments.remat]:
        try:
            found, measured = run(case, remat, arguments.rounds)
        except CalibrationError as error:
            sys.exit(f"no comparison, remat={remat}: {error}")
        every |= {(str(remat), name): one for name, one in found.items()}
        rows = [
            [
                name,
                one.slots,
                *(f"{1e3 * t:.0f}" for t in (one.makespan, one.empty, one.taken)),
                f"{one.taken / one.said:.3f}",
            ]
            for name, one in found.items()
        ]
        header = [f"remat={remat}", "slots", "clock ms", "+ empty", "measured ms", "ratio"]
        ratio = found["zb_v, V=2"].taken / found["eager_1f1b, V=1"].taken
        parts += [table(header, rows), f"zb_v / eager_1f1b: {ratio:.3f} (wanted < 1)"]
        parts += [f"V={V}, on one core: {calibration}" for V, calibration in measured.items()]
    print(conclusion(every, case, arguments.rounds), *parts, sep="\n\n")


if __name__ == "__main__":
    main()
