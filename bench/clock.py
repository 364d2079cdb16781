"""What the lockstep clock says a step takes, and what it takes: ``python -m bench.clock``.

The clock is given F, B, I and W of every stage, measured in a process of one core, and the slots
that the kernel runs. To that comes what the same step takes when only its first microbatch runs,
less what that one's actions take: memory that is made and cleared (much of it for gpipe, whose
stashes are many), exchanges, dispatch.
S = 2, V = 1 and 2, every family that is legal there. Letters: S ranks, K stages, V chunks, M
microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import costs
from bench.cases import Case, gradients_of, mean_square, reference, see_that_it_agrees
from bench.measure import Timer, interleaved, seconds, table

import jax  # isort: skip
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import Pipeline

RANKS = 2
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


def run(case: Case, remat: Any, rounds: int) -> dict[str, Found]:
    """Each family, predicted and measured; prints the costs."""
    measured = {V: costs.measure(case, V * RANKS, remat, rounds) for V in (1, 2)}
    kinds = ("F", "B", "I", "W")
    rows = [
        [f"V={V}, {role} stage", *(f"{1e3 * one.of[kind, role]:.2f}" for kind in kinds)]
        for V, one in measured.items()
        for role in costs.ROLES
        if ("F", role) in one.of
    ]
    print(table([f"remat={remat}: ms on one core", *kinds], rows), end="\n\n")
    pipes = pipelines(case, remat)
    timers: dict[tuple[str, str], Timer] = {}
    for name, (pipe, step) in pipes.items():
        timers[name, "step"] = functools.partial(seconds, step)
        empty = costs.almost_empty(pipe, step.args)
        timers[name, "empty"] = functools.partial(seconds, empty)
    taken = interleaved(timers, rounds)
    found = {}
    for name, (pipe, _) in pipes.items():
        one = measured[pipe.plan.num_chunks]
        given = costs.as_costs(pipe.schedule, one, 0.0)
        slots, makespan = costs.predict(pipe, given, "lockstep")
        empty = taken[name, "empty"] - costs.alone(pipe.schedule, given)
        found[name] = Found(slots, makespan, empty, taken[name, "step"])
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.clock", description=__doc__)
    parser.add_argument("--remat", choices=["None", "stage", "both"], default="None")
    parser.add_argument("--rounds", type=int, default=3, help="runs per variant (3)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    case = CASE.small() if arguments.small else CASE
    print(f"{case.text()}, S={RANKS}, jax {jax.__version__}, {platform.machine()}")
    print(f"medians of {arguments.rounds} interleaved runs; wanted: measured / predicted <= 1.05")
    remats = {"None": [None], "stage": ["stage"], "both": [None, "stage"]}
    for remat in remats[arguments.remat]:
        found = run(case, remat, arguments.rounds)
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
        print(table(header, rows))
        ratio = found["zb_v, V=2"].taken / found["eager_1f1b, V=1"].taken
        print(f"zb_v / eager_1f1b: {ratio:.3f} (wanted < 1)\n", flush=True)


if __name__ == "__main__":
    main()
