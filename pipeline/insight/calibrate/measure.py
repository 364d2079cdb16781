"""Durations of a pipeline's actions, measured in the kernel that runs them.

A pipeline of one rank (`pipeline.insight.calibrate.one_rank`) has one copy of each stage that
differs from the others. Its program is made like any pipeline's. It is timed with its first
microbatch alone, with one kind of action of one stage for all microbatches, and with all actions of
a rank's stages in turn.

The time of an action is the time that it adds to the first microbatch's step. In turn, actions of a
rank take longer than alone. Alone, an action finds its weights in a cache; in turn, other stages'
weights have replaced them.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collectives import STAGE, exchange, vary
from collectives.compat import to_device, to_host
from collectives.places.homes import processes_of
from collectives.places.sizes import is_size
from pipeline.base.chips import TPU_OVERLAP
from pipeline.base.tree import Tree, shape_text
from pipeline.core.model.microbatch import map_rows
from pipeline.core.options.plan import Plan
from pipeline.core.placement import meshes
from pipeline.insight.calibrate.calibration import Calibration
from pipeline.insight.calibrate.conclude import (
    Key,
    Timed,
    Took,
    conclude,
    slices_of,
    spread_of,
)
from pipeline.insight.calibrate.one_rank import (
    Chain,
    Runs,
    entries,
    find_chain,
    first_and,
    one_rank,
    operands_of,
    partial_step,
    rows_of,
)
from schedules.core.costs import Costs, is_last_forward_free

EXCHANGES = 100  # in one timed run
TRIPS = 20  # to host memory and back, in one timed run
FIRST = "first"  # key of the step with the first microbatch alone
SLICE = "slice"  # with a number: key of the step with one slice of the other microbatches
MOST_IN_FLIGHT = 4  # microbatches, so that their stashes fit in memory with the pipeline


def calibrate(
    pipe: Any,
    make: Callable[..., Any],
    inputs: Tree,
    targets: Tree,
    extras: Any,
    *,
    rounds: int,
    repeats: int,
    split: bool,
    message: Callable[[], int],
    moved: Callable[[], int] = int,
) -> Calibration:
    """Measure the actions of a pipeline of arrays, whose class is ``make``.

    ``message()`` returns the bytes of a message between the pipeline's stages, ``moved()`` the
    bytes of a stash or crossing that moves to host memory, 0 if none does.
    `pipeline.Pipeline.calibrate` explains the other arguments.

    Raises:
      ValueError: arguments that do not fit, or a pipeline whose actions cannot be timed one by one.
      CalibrationError: the times are noise, or they contradict each other.
    """
    _check(pipe, rounds=rounds, repeats=repeats)
    batch = inputs, targets, extras
    sizes: dict[str, Any] = {"message": message, "moved": moved}
    measured = Calibrator(pipe, make, *batch, repeats=repeats, split=split, **sizes)
    for _ in range(rounds):
        measured.turn()
    return measured.conclude()


class Calibrator:
    """A calibration, round by round, for callers that do other work between rounds.

    `calibrate` explains most arguments; further arguments are:

    * in_flight: number of microbatches in flight; by default as in the pipeline, at most
      `MOST_IN_FLIGHT`.
    * held: stages of each rank; by default as in the pipeline.

    Attributes:
      operands: the plan and the arguments of the step that gives the overhead, as
        `pipeline.insight.forecast.bytes.predict` takes them.
    """

    def __init__(
        self,
        pipe: Any,
        make: Callable[..., Any],
        inputs: Tree,
        targets: Tree,
        extras: Any,
        *,
        repeats: int,
        split: bool,
        message: Callable[[], int],
        moved: Callable[[], int] = int,
        in_flight: int | None = None,
        held: Sequence[Sequence[int]] | None = None,
    ) -> None:
        plan = pipe.plan
        if in_flight is None:
            program = plan.training
            units = plan.num_chunks * plan.schedule.num_slices  # of each microbatch, on a rank
            in_flight = min(MOST_IN_FLIGHT, -(-program.values["stash"].device // units)) or 1
        self._pipe, self._chain, self._repeats = pipe, find_chain(pipe), repeats
        ranks = [
            tuple(sorted({self._chain.stands_for(k) for k in stages}))
            for stages in held or plan.schedule.stages_of
        ]
        self._programs = ("FB", "FIW") if split else ("FB",)
        rows = functools.partial(rows_of, plan=plan, num_microbatches=repeats + 1)
        self._batch = map_rows(plan.axes, rows, inputs, targets, extras)
        self._alone = []  # pipelines of one rank, which keep their compiled steps alive
        steps: dict[Any, Callable[[], Any]] = {}
        for kinds in self._programs:
            with warnings.catch_warnings():  # the user's pipeline has shown them
                warnings.simplefilter("ignore")
                one = one_rank(pipe, make, self._chain, kinds, repeats + 1, in_flight)
            self._alone.append(one)
            program, operands = one.plan.training, operands_of(one, *self._batch)
            if kinds == self._programs[0]:
                self.operands = one.plan, *operands
            run = partial_step(one.plan, operands)
            beside = functools.partial(first_and, program)
            which: dict[Any, Runs] = {FIRST: beside()}
            which |= {(stages, kinds): beside(entries(program, stages)) for stages in ranks}
            for n in dict.fromkeys(map(self._chain.kinds.index, self._chain.kinds)):
                which |= {(n, kind): beside(entries(program, [n], kind)) for kind in kinds}
            if kinds == self._programs[0] and plan.schedule.num_slices > 1:
                for part in range(plan.schedule.num_slices):
                    which[SLICE, part] = beside(program.op > 0, part)
            for key, runs in which.items():
                steps[kinds, key] = functools.partial(run, jnp.asarray(runs))
        if plan.schedule.num_ranks > 1:
            steps["exchanges", None] = exchanges(plan.mesh, message())
        if size := moved():
            steps["host", None] = trips(plan.mesh.devices.flat[0], size)
        self._steps, self._shuffle = steps, random.Random(0).shuffle  # noqa: S311  no secret
        for step in steps.values():
            seconds(step)
        self._taken: dict[Any, list[float]] = {key: [] for key in steps}

    def turn(self) -> None:
        """Run each step once, in a random order.

        A disturbance of the machine then slows all steps alike, and no step always finds the same
        data in caches. Steps of one program run together, after one run that is not counted. So no
        counted run pays for the memory that another program's step has released.
        """
        for program in dict.fromkeys(program for program, _ in self._steps):
            order = [key for key in self._steps if key[0] == program]
            self._shuffle(order)
            seconds(self._steps[order[0]])
            for key in order:
                self._taken[key].append(seconds(self._steps[key]))

    def conclude(self, rounds: int | None = None) -> Calibration:
        """Compute the calibration from all rounds, or from the last ``rounds`` of them.

        Raises:
          CalibrationError: the times are noise, or they contradict each other.
        """
        pipe, chain, repeats = self._pipe, self._chain, self._repeats
        last = {key: times[-(rounds or len(times)) :] for key, times in self._taken.items()}
        timed, slices = [], None
        for program in self._programs:
            of = {key: times for (kinds, key), times in last.items() if kinds == program}
            first = of.pop(FIRST)
            parts = [of.pop(key) for key in list(of) if key[0] == SLICE]
            if parts:
                slices = slices_of(Timed(first, {}, {}, repeats), parts)
            turns = {key[0]: of.pop(key) for key in list(of) if isinstance(key[0], tuple)}
            timed.append(_weighted(Timed(first, turns, of, repeats), chain))
        names = {n: f"stage {k}" for n, k in enumerate(chain.stages)}
        found = conclude(timed, names, _idle(chain, pipe.plan))
        each = sum(found[key].median for key in timed[0].of)
        overhead = max(0.0, spread_of(timed[0].first).median - each)
        exchanged = [t / EXCHANGES for t in last.get(("exchanges", None), [0.0])]
        count = len(timed[0].first)
        took = spread_of(exchanged)
        whole = pipe.plan.schedule.num_slices  # messages of a microbatch
        took = Took(whole * took.median, whole * took.spread)
        result = _calibration(pipe, chain, found, took, overhead, self._batch, count, repeats)
        costs = replace(result.costs, slices=slices)
        if host := last.get(("host", None)):
            overlap = TPU_OVERLAP if result.hardware["platform"] == "tpu" else 0.0
            copied = spread_of(host).median / (2 * TRIPS)
            costs = replace(costs, host=copied, host_overlap=overlap)
        return replace(result, costs=costs)


def _check(pipe: Any, **counts: Any) -> None:
    for name, count in counts.items():
        if not is_size(count):
            raise ValueError(f"{name}={count!r}: must be an integer > 0")
    devices = pipe.plan.mesh.devices.flat
    if len(processes_of(devices)) > 1:
        raise ValueError(
            "calibrate() measures within one process, and this pipeline's mesh spans several: "
            "calibrate the same stages in a process of its own, on one device of this kind, write "
            "the result with to_json(path) and give Pipeline(costs=Calibration.from_json(path)) "
            "to all"
        )
    if meshes.mesh_in_force() is not None:
        raise ValueError(
            "calibrate() makes pipelines on a mesh of one rank, and another mesh is in force; call "
            "it outside of jax.set_mesh"
        )


def seconds(step: Callable[[], Any]) -> float:
    """Time one run of a step, in seconds, until its results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def _weighted(one: Timed, chain: Chain) -> Timed:
    """Extend the times to stages that were not timed, because they equal timed stages."""
    twins = [(n, chain.kinds.index(kind)) for n, kind in enumerate(chain.kinds)]
    of = {(n, kind): one.of[m, kind] for n, m in twins for j, kind in one.of if j == m}
    return Timed(one.first, one.turns, of, one.repeats)


def _idle(chain: Chain, plan: Plan) -> set[Key]:
    """Return the actions that compute nothing."""
    idle = {(n, kind) for n, of in enumerate(chain.kinds) if of in chain.idle for kind in "BIW"}
    if is_last_forward_free(  # on one rank the head is not shared
        recomputes=plan.remat == "stage", shares_head=False, writes=plan.state is not None
    ):
        idle.add((len(chain.stages) - 1, "F"))
    return idle


def exchanges(mesh: Mesh, size: int) -> Callable[[], jax.Array]:
    """Make a function that runs `EXCHANGES` exchanges of ``size`` bytes between neighbours."""
    ranks = mesh.shape[STAGE]
    edges = [(r + d, r + 1 - d) for r in range(0, ranks - 1, 2) for d in (0, 1)]

    def body() -> jax.Array:
        def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return exchange(x, edges, STAGE), None

        x = vary(jnp.zeros(max(1, size // 4), jnp.float32), STAGE)
        return jax.lax.scan(one, x, length=EXCHANGES)[0][:1]

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(STAGE)))


def trips(device: Any, size: int) -> Callable[[], jax.Array]:
    """Make a function that writes ``size`` bytes to host memory and reads them, `TRIPS` times."""
    count = max(1, size // 4)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        def one(carry: Any, place: jax.Array) -> tuple[Any, None]:
            pool, x = carry
            pool = jax.lax.dynamic_update_slice(pool, to_host(x[None]), (place, jnp.int32(0)))
            x = to_device(jax.lax.dynamic_slice(pool, (place, jnp.int32(0)), (1, count)))
            return (pool, x[0] + 1), None

        pool = to_host(jnp.zeros((2, count), jnp.float32))
        return jax.lax.scan(one, (pool, x), jnp.arange(TRIPS, dtype=jnp.int32) % 2)[0][1]

    return functools.partial(run, jax.device_put(jnp.zeros(count, jnp.float32), device))


def _calibration(
    pipe: Any,
    chain: Chain,
    found: Mapping[Key, Took],
    exchanged: Took,
    overhead: float,
    batch: Tree,
    rounds: int,
    repeats: int,
) -> Calibration:
    """Build the calibration, with the costs of every stage of the model."""
    plan, kinds = pipe.plan, [kind for kind in "FBIW" if (0, kind) in found]
    stages = [chain.stands_for(k) for k in range(plan.schedule.num_stages)]
    of = {kind: [max(0.0, found[n, kind].median) for n in stages] for kind in kinds}
    spread = {kind.lower(): tuple(found[n, kind].spread for n in stages) for kind in kinds}
    ends = {"head": 0.0, "embed": 0.0}
    inner = chain.inner()
    if inner is not None and "head" in plan.shared:
        ends["head"] = max(0.0, of["B"][-1] - found[inner, "B"].median)
        of["F"][-1] = max(0.0, found[inner, "F"].median)  # its output is sent to all ranks
    first = next((n for n, k in enumerate(chain.kinds) if k[0] == chain.kinds[0][0] and n), None)
    if first is not None and "embed" in plan.shared:
        ends["embed"] = max(0.0, of["F"][0] - found[first, "F"].median)
    for kind in kinds:
        if kind in "FBI":
            of[kind][0] = max(0.0, of[kind][0] - ends["embed"])
        if kind in "BI":
            of[kind][-1] = max(0.0, of[kind][-1] - ends["head"])
    if "I" not in of:  # these costs promise no gain from splitting a backward
        of |= {"I": of["B"], "W": [0.0] * len(stages)}
        spread |= {"i": spread["b"], "w": (0.0,) * len(stages)}
    whole: dict[str, Any] = {"b": of["B"], "comm": max(0.0, exchanged.median), **ends}
    costs = Costs(of["F"], of["I"], of["W"], **whole)
    leaves = jax.tree.leaves(batch[0])
    each = leaves[0].shape[0] // (repeats + 1) // plan.axes.num_rows
    device = plan.mesh.devices.flat[0]
    return Calibration(
        costs,
        {**spread, "comm": (exchanged.spread,)},
        overhead,
        plan.signature,
        shape_text(jax.ShapeDtypeStruct((each, *leaves[0].shape[1:]), leaves[0].dtype)),
        rounds,
        repeats,
        {
            "device": device.device_kind,
            "platform": device.platform,
            "devices": plan.mesh.size // plan.schedule.num_ranks,
            "cpus": os.cpu_count() or 1,
        },
        {
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "python": platform.python_version(),
            "shardpipe": metadata.version("shardpipe"),
        },
    )
