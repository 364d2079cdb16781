"""What one action takes: the kernel runs a step in which all other actions are idle.

The step is one rank's, S = 1, K = 3 stages: the first, which needs no gradient for its input, one
in the middle, and the last, which has the loss. Time is measured in context: one F, all F of a
stage, then also I, then also W.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, mean_square
from bench.measure import Variant, interleaved, seconds
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collectives import exchange, make_mesh, vary
from pipeline import Pipeline
from schedules import Costs, Program, Schedule, from_orders, simulate

EXCHANGES = 100
ROLES = ("first", "middle", "last")  # stages 0, 1 and 2 of the step
# The kinds of backward that a step has, and the kinds of action that are not idle.
STEPS = {
    "F": ("FB", "F"),
    "FB": ("FB", "FB"),
    "FI": ("FIW", "FI"),
    "FIW": ("FIW", "FIW"),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of each kind of action, by role.

    Attributes:
      of: (kind, role) to seconds.
      empty: a step without any action.
    """

    of: dict[tuple[str, str], float]
    empty: float


def timetable(kinds: str, microbatches: int) -> Schedule:
    """One rank, three stages; a backward runs when the next microbatch has gone forward."""
    order = []
    for m in range(microbatches + 1):
        order += [f"{k}F{m}" for k in range(3) if m < microbatches]
        order += [f"{k}{kind}{m - 1}" for k in (2, 1, 0) for kind in kinds[1:] if m]
    return from_orders([order], name=kinds)


def only(program: Program, stage: int, kinds: str, most: int) -> Program:
    """The program with one stage's actions of some kinds on the first microbatches.

    Other kinds of the same stage are compiled all the same: results that nobody could read would
    not be computed.
    """
    op, early = np.zeros_like(program.op), program.microbatch < most
    slots = []
    for index, slot in enumerate(program.slots):
        kept = tuple(one for one in slot.ops if one.chunk == stage)
        for branch, one in enumerate(kept, start=1):
            if one.kind in kinds:
                here = program.op[:, index] == slot.ops.index(one) + 1
                op[:, index][here & early[:, index]] = branch
        slots.append(slot._replace(ops=kept))
    return dataclasses.replace(program, op=op, slots=tuple(slots))


def step(
    case: Case, remat: Any, of: str, stage: int, kinds: str, *, most: int | None = None
) -> Variant:
    """A step of some actions."""
    mesh = make_mesh(stage=1)
    pipe = Pipeline(
        case.stages(3),
        case.microbatches,
        schedule=timetable(of, case.microbatches),
        mesh=mesh,
        loss_fn=mean_square,
        remat=remat,
    )
    # What `Plan` would lower, less the other actions.
    most = case.microbatches if most is None else most
    pipe.plan.__dict__["training"] = only(pipe.plan.training, stage, kinds, most)
    return functools.partial(pipe.value_and_grad, *case.data())


def almost_empty(pipe: Pipeline, batch: Any) -> Variant:
    """The step of a pipeline in which all actions but one F of stage 0 are idle.

    All that a step costs beside its actions: memory that is made and cleared, exchanges of nothing,
    dispatch.
    """
    program = pipe.plan.training
    op = np.zeros_like(program.op)
    for index, slot in enumerate(program.slots):
        for branch, one in enumerate(slot.ops, start=1):
            if one.kind == "F" and one.first:
                found = (program.op[:, index] == branch) & (program.microbatch[:, index] == 0)
                op[:, index][found] = branch
    other = copy.copy(pipe)
    other.plan = dataclasses.replace(pipe.plan)  # compared by identity: compiled anew
    other.plan.__dict__["training"] = dataclasses.replace(program, op=op)
    return functools.partial(other.value_and_grad, *batch)


def builders(case: Case, remat: Any, roles: tuple[str, ...], steps: tuple[str, ...]) -> Builders:
    """Steps by "role kinds"."""
    found: dict[str, Callable[[], Variant]] = {
        # Not none at all: a table of zeros compiles to something else, ten times as slow.
        "one F": functools.partial(step, case, remat, "FB", 0, "F", most=1)
    }
    for role in roles:
        stage = ROLES.index(role)
        for name in steps:
            of, kinds = STEPS[name]
            found[f"{role} {name}"] = functools.partial(step, case, remat, of, stage, kinds)
    return found


def measure(case: Case, stages: int, remat: Any, rounds: int, *, split: bool = True) -> Measured:
    """Costs of the actions of K equal stages, on one core; of I and W only if ``split``."""
    case = dataclasses.replace(case, layers=3 * case.layers // stages, microbatches=8)
    roles = ROLES if stages > 2 else ("first", "last")
    make = functools.partial(builders, case, remat, roles, tuple(STEPS)[: 4 if split else 2])
    with Pinned(make) as pinned:
        taken = interleaved({n: functools.partial(pinned.seconds, n) for n in make()}, rounds)
    one_f = (taken["first F"] - taken["one F"]) / (case.microbatches - 1)
    empty = taken["one F"] - one_f
    of: dict[tuple[str, str], float] = {}
    for role in roles:
        f, fb, *rest = (taken[name] for name in make() if name.startswith(role))
        sums = {"F": f - empty, "B": fb - f}
        if rest:
            fi, fiw = rest
            sums |= {"I": fi - f, "W": fiw - fi}
        of |= {(kind, role): max(0.0, t / case.microbatches) for kind, t in sums.items()}
    return Measured(of, empty)


def exchange_seconds(mesh: Mesh, case: Case, rounds: int) -> float:
    """A message each way between neighbours that are both waiting for it, in pairs."""
    ranks = mesh.shape["stage"]
    edges = [(r + d, r + 1 - d) for r in range(0, ranks - 1, 2) for d in (0, 1)]

    def body() -> jax.Array:
        def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return exchange(x, edges, "stage"), None

        x = vary(jnp.zeros(case.shape), "stage")
        return jax.lax.scan(one, x, length=EXCHANGES)[0][:1]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("stage")))
    timer = functools.partial(seconds, run)
    return interleaved({"exchanges": timer}, rounds)["exchanges"] / EXCHANGES


def as_costs(schedule: Schedule, measured: Measured, comm: float) -> Costs:
    """The costs of every stage; a schedule without I and W has its B in I."""
    last = schedule.num_stages - 1
    roles = ["first" if k == 0 else "last" if k == last else "middle" for k in range(last + 1)]
    kinds = {action.kind for order in schedule.orders for action in order}

    def each(kind: str) -> list[float]:
        return [measured.of[kind, role] for role in roles]

    if "W" in kinds:
        return Costs(each("F"), each("I"), each("W"), comm)
    return Costs(each("F"), each("B"), 0.0, comm)


def predict(pipe: Pipeline, costs: Costs, clock: str) -> tuple[str, float]:
    """The slots that the kernel runs, and the makespan of a step in seconds."""
    # `lower` has chosen for F = I = W, whatever the costs turn out to be.
    chosen = simulate(pipe.schedule, clock="lockstep", pattern=pipe.plan.pattern, **pipe.plan.sends)
    slots = str(chosen.pattern)
    if clock == "event":
        return slots, simulate(pipe.schedule, costs).makespan
    report = simulate(pipe.schedule, costs, "lockstep", pattern=slots, **pipe.plan.sends)
    return slots, report.makespan
