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
from collectives import exchange, make_mesh
from pipeline import Pipeline

RANKS = 2
CASE = Case("gpt", "gpt", 4, 256, microbatches=16, rows=4, context=128, heads=4)
EXCHANGES = 100


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


def exchange_seconds(case: Case, rounds: int) -> float:
    """A message each way between two devices that are both waiting for it."""
    mesh = make_mesh(stage=RANKS)

    def body(x: jax.Array) -> jax.Array:
        def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return exchange(x, [(0, 1), (1, 0)], "stage"), None

        return jax.lax.scan(one, x, length=EXCHANGES)[0]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("stage"), out_specs=P("stage")))
    x = jax.numpy.zeros((RANKS * case.shape[0], *case.shape[1:]))
    timer = functools.partial(seconds, functools.partial(run, x))
    return interleaved({"exchanges": timer}, rounds)["exchanges"] / EXCHANGES


def as_costs(
    schedule: schedules.Schedule, measured: costs.Measured, comm: float
) -> schedules.Costs:
    """The costs of every stage; a schedule without I and W has its B in I."""
    last = schedule.num_stages - 1
    roles = ["first" if k == 0 else "last" if k == last else "middle" for k in range(last + 1)]
    kinds = {action.kind for order in schedule.orders for action in order}
    of = measured.of
    f = [of["F", role] for role in roles]
    if "W" not in kinds:
        return schedules.Costs(f, [of["B", role] for role in roles], 0.0, comm)
    return schedules.Costs(
        f, [of["I", role] for role in roles], [of["W", role] for role in roles], comm
    )


def predict(pipe: Pipeline, measured: costs.Measured, comm: float) -> tuple[str, float]:
    """The slots that the kernel runs, and seconds of a step."""
    partners = pipe.plan.partners
    lowered = schedules.simulate(
        pipe.schedule, clock="lockstep", pattern=pipe.plan.pattern, partners=partners
    ).pattern
    report = schedules.simulate(
        pipe.schedule,
        as_costs(pipe.schedule, measured, comm),
        "lockstep",
        pattern=lowered,
        partners=partners,
    )
    return str(lowered), report.makespan + measured.empty


def pipelines(case: Case, remat: Any) -> dict[str, tuple[Pipeline, Any]]:
    """Every family, checked, and its step."""
    wanted, mesh = reference(case), make_mesh(stage=RANKS)
    batch = jax.device_put(case.data(), jax.sharding.NamedSharding(mesh, P()))
    found = {}
    for schedule in families(case.microbatches):
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
    comm = exchange_seconds(case, rounds)
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
    return {
        name: (*predict(pipe, measured[pipe.plan.num_chunks], comm), taken[name])
        for name, (pipe, _) in pipes.items()
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.clock", description=__doc__)
    parser.add_argument("--remat", choices=["None", "stage", "both"], default="None")
    parser.add_argument("--rounds", type=int, default=5, help="runs per variant (5)")
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
