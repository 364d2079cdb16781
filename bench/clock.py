"""What the lockstep clock says a step takes, and what it takes: ``python -m bench.clock``.

The clock is given F, B, I and W of every stage, measured in a process of one core, the time of an
exchange between two devices, and the slots that the kernel runs. S = 2, V = 1 and 2, every family
that is legal there. Letters: S ranks, K stages, V chunks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import platform
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import costs
from bench.cases import Case, gradients_of, mean_square, reference, see_that_it_agrees
from bench.measure import interleaved, seconds, table

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


def run(case: Case, remat: Any, rounds: int) -> dict[str, tuple[str, float, float]]:
    """Slots, predicted and measured seconds of each family; prints the costs."""
    comm = costs.exchange_seconds(make_mesh(stage=RANKS), case, rounds)
    measured = {V: costs.measure(case, V * RANKS, remat, rounds) for V in (1, 2)}
    kinds = ("F", "B", "I", "W")
    rows = [
        [f"V={V}, {role} stage", *(f"{1e3 * one.of[kind, role]:.2f}" for kind in kinds)]
        for V, one in measured.items()
        for role in costs.ROLES
        if ("F", role) in one.of
    ]
    print(f"remat={remat}: exchange {1e3 * comm:.2f} ms, empty step {1e3 * measured[1].empty:.1f}")
    print(table(["ms on one core", *kinds], rows), end="\n\n")
    pipes = pipelines(case, remat)
    taken = interleaved({n: functools.partial(seconds, s) for n, (_, s) in pipes.items()}, rounds)
    found = {}
    for name, (pipe, _) in pipes.items():
        one = measured[pipe.plan.num_chunks]
        given = costs.as_costs(pipe.schedule, one, comm)
        slots, makespan = costs.predict(pipe, given, "lockstep")
        found[name] = slots, makespan + one.empty, taken[name]
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
            [name, slots, f"{1e3 * said:.0f}", f"{1e3 * took:.0f}", f"{took / said:.3f}"]
            for name, (slots, said, took) in found.items()
        ]
        header = [f"remat={remat}", "slots", "predicted ms", "measured ms", "ratio"]
        print(table(header, rows))
        ratio = found["zb_v, V=2"][2] / found["eager_1f1b, V=1"][2]
        print(f"zb_v / eager_1f1b: {ratio:.3f} (wanted < 1)\n", flush=True)


if __name__ == "__main__":
    main()
