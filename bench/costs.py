"""What one action takes: the kernel runs a step in which all other actions are idle.

The step is one rank's, S = 1, K = 3 stages: the first, which needs no gradient for its input, one
in the middle, and the last, which has the loss. Its first microbatch goes through all actions, for
what no tick does is not compiled, and what nobody reads is not computed. An action's time is what a
step takes longer that runs it for all microbatches: all F of a stage, then also I, then also W.

Letters: M microbatches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, mean_square
from bench.measure import Variant, interleaved, seconds
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collectives import exchange, make_mesh, vary
from pipeline import Pipeline
from schedules import Costs, Program, Schedule, from_orders, simulate

EXCHANGES = 100
ROLES = ("first", "middle", "last")  # stages 0, 1 and 2 of the step
# The kinds of backward that a step has, and those of a stage that run for all microbatches.
STEPS = {
    "FB": ("FB", ""),
    "FB F": ("FB", "F"),
    "FB FB": ("FB", "FB"),
    "FIW": ("FIW", ""),
    "FIW F": ("FIW", "F"),
    "FIW FI": ("FIW", "FI"),
    "FIW FIW": ("FIW", "FIW"),
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


def only(program: Program, stage: int = -1, kinds: str = "") -> Program:
    """The program with the first microbatch's actions, and a rank's of some kinds for all.

    Args:
      program: of a whole step.
      stage: of which chunk of each rank all microbatches run.
      kinds: its actions that do.
    """
    op, later = program.op.copy(), program.microbatch > 0
    for index, slot in enumerate(program.slots):
        for branch, one in enumerate(slot.ops, start=1):
            if one.chunk != stage or one.kind not in kinds:
                op[:, index][(program.op[:, index] == branch) & later[:, index]] = 0
    return dataclasses.replace(program, op=op)


def pipeline(case: Case, remat: Any, of: str, stage: int, kinds: str) -> Pipeline:
    """One whose step runs some actions for all microbatches, all others for the first."""
    pipe = Pipeline(
        case.stages(3),
        case.microbatches,
        schedule=timetable(of, case.microbatches),
        mesh=make_mesh(stage=1),
        loss_fn=mean_square,
        remat=remat,
    )
    # What `Plan` would lower, less the other actions.
    pipe.plan.__dict__["training"] = only(pipe.plan.training, stage, kinds)
    return pipe


def step(case: Case, remat: Any, of: str, stage: int, kinds: str) -> Variant:
    """The step of such a pipeline."""
    return functools.partial(pipeline(case, remat, of, stage, kinds).value_and_grad, *case.data())


def almost_empty(pipe: Pipeline, batch: Any) -> Variant:
    """The step of a pipeline in which all actions but the first microbatch's are idle.

    All that a step costs beside its actions: memory that is made and cleared, exchanges of nothing,
    dispatch; and what `alone` says.
    """
    other = copy.copy(pipe)
    other.plan = dataclasses.replace(pipe.plan)  # compared by identity: compiled anew
    other.plan.__dict__["training"] = only(pipe.plan.training)
    return functools.partial(other.value_and_grad, *batch)


def alone(schedule: Schedule, costs: Costs) -> float:
    """Seconds in which the first microbatch goes through all stages and back."""
    orders = [[a for a in order if a.microbatch == 0] for order in schedule.orders]
    return simulate(from_orders(orders, name="one microbatch"), costs).makespan


def builders(case: Case, remat: Any, names: tuple[str, ...]) -> Builders:
    """Steps by role and name of the step; those of one microbatch have no role."""
    found: dict[str, Callable[[], Variant]] = {}
    for name in names:
        of, kinds = STEPS[name]
        for role in ROLES if kinds else ("",):
            stage = ROLES.index(role) if role else -1
            found[f"{role} {name}"] = functools.partial(step, case, remat, of, stage, kinds)
    return found


def measure(case: Case, stages: int, remat: Any, rounds: int, *, split: bool = True) -> Measured:
    """Costs of the actions of K equal stages, on one core; of I and W only if ``split``.

    Raises:
      ContradictionError: an action that computes takes no time.
    """
    case = dataclasses.replace(case, layers=3 * case.layers // stages, microbatches=8)
    names = tuple(name for name in STEPS if split or name.startswith("FB"))
    make = functools.partial(builders, case, remat, names)
    with Pinned(make) as pinned:
        taken = interleaved({n: functools.partial(pinned.seconds, n) for n in make()}, rounds)
    of: dict[tuple[str, str], float] = {}
    for role in ROLES:
        for steps in (names[:3], names[3:]):
            times = [taken[f"{role if STEPS[name][1] else ''} {name}"] for name in steps]
            for name, before, after in zip(steps[1:], times, times[1:], strict=False):
                kind = name[-1]
                of.setdefault((kind, role), (after - before) / (case.microbatches - 1))
    see_that_nothing_is_free(of, remat)
    once = sum(of[kind, role] for kind in "FB" for role in ROLES)
    return Measured(of, taken[" FB"] - once)


class ContradictionError(RuntimeError):
    """Numbers that cannot all be right."""


def see_that_nothing_is_free(of: Mapping[tuple[str, str], float], remat: Any) -> None:
    """See that actions that compute take their time.

    Raises:
      ContradictionError: one takes less than a twentieth of the longest of its stage.
    """
    for (kind, role), time in of.items():
        if kind == "F" and role == "last" and remat == "stage":
            continue  # its output is what only its own backward needs, which computes it again
        longest = max(t for (_, r), t in of.items() if r == role)
        if time < longest / 20:
            raise ContradictionError(
                f"{kind} of the {role} stage takes {1e3 * time:.3f} ms, and another of its "
                f"actions {1e3 * longest:.3f}: what it computes was not run, or the machine is not "
                f"quiet; see that the HLO of its step has its products, or measure again"
            )


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
