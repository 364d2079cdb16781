"""The stages of a pipeline that differ, as a pipeline of one rank whose actions run one by one.

The compiled step takes the table entries to run as an operand (`partial_step`). So one compilation
serves for the step of one kind of action alone and for the step of all actions.

Letters: K stages, M microbatches, T ticks, S ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from collectives import STAGE
from pipeline.base.tree import Tree, signature
from pipeline.core.model.stage import define, take_stage
from pipeline.core.options.plan import Plan
from pipeline.core.placement import meshes
from pipeline.core.step import runtime
from pipeline.core.step.operands import Operands, make_operands
from pipeline.layers_view.replace import ends_of
from schedules import Program, Schedule, from_orders

Runs = NDArray[np.bool_]  # [T, slots, S] which entries of a program's table run


@dataclass(frozen=True)
class Chain:
    """Stages to time, in order, on one rank: the first of each run of equal stages.

    Attributes:
      stages: the indices of these stages in the model, ascending.
      kinds: the kind of each of these stages; of equal stages, only the first is timed.
      kind_of: [K] the kind of every stage of the model.
      idle: kinds of stages whose backward computes nothing.
    """

    stages: tuple[int, ...]
    kinds: tuple[Any, ...]
    kind_of: tuple[Any, ...]
    idle: frozenset[Any]

    def stands_for(self, k: int) -> int:
        """Return the index in the chain of the stage that is timed for stage k."""
        return self.kinds.index(self.kind_of[k])

    def inner(self) -> int | None:
        """Return the index of an inner stage that equals the last; None if there is none."""
        group, way, _, _ = self.kinds[-1]
        here = (n for n, kind in enumerate(self.kinds) if kind == (group, way, False, False))
        return next(here, None)


def find_chain(pipe: Any) -> Chain:
    """Find the stages that differ in computation, in needed gradients, or as first or last."""
    plan, kind_of, found = pipe.plan, [], []
    needs_gradients = pipe.trained.needs_gradients(want_inputs=False)
    groups: list[Any] = []
    last = plan.schedule.num_stages - 1
    for k in range(last + 1):
        definition, params, rest = define(_stage(pipe, k), "a stage")
        key = definition, signature((params, rest))
        if key not in groups:
            groups.append(key)
        kind_of.append((groups.index(key), needs_gradients[k], k == 0, k == last))
    for k, kind in enumerate(kind_of):
        if k == 0 or kind != kind_of[k - 1]:
            found.append((k, kind))
    kinds = [kind for _, kind in found]
    group, way, *_ = kind_of[-1]
    inner = group, way, False, False
    if (
        "head" in plan.shared
        and inner not in kinds
        and [g for g, *_ in kind_of[-2:]] == [group] * 2
    ):
        found.insert(-1, (last, inner))  # the last stage without the head, whose time is the rest
    idle = frozenset(kind for _, kind in found if not kind[1].is_any)
    stages, kinds = zip(*found, strict=True)
    return Chain(stages, kinds, tuple(kind_of), idle)


def _stage(pipe: Any, k: int) -> nnx.Module:
    for rank, held in enumerate(pipe.schedule.stages_of):
        if k in held:
            return take_stage(pipe.chunks[held.index(k)], rank)
    raise AssertionError(k)


def one_rank(
    pipe: Any,
    make: Callable[..., Any],
    chain: Chain,
    kinds: str,
    microbatches: int,
    in_flight: int,
) -> Any:
    """Make a pipeline of a chain's stages on the devices of the first rank."""
    plan, mesh = pipe.plan, pipe.plan.mesh
    devices = np.take(mesh.devices, [0], axis=mesh.axis_names.index(STAGE))
    options = plan.options.to_dict() | {
        "mesh": Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types),
        "num_microbatches": microbatches,
        "schedule": timetable(
            len(chain.stages), kinds, microbatches, in_flight, plan.schedule.num_slices
        ),
        "engine": "scan",
        "pattern": "single",
        "delayed": False,
        "offload": None,
        "ignore": (),
        "wrt": _remapped(plan.wrt, chain.stages),
        "costs": None,
        # With windows, an action that is timed alone would gather another chunk's weights too.
        "gather": "step" if plan.has_windows else plan.gather,
    }
    return make([_stage(pipe, k) for k in chain.stages], **options | ends_of(pipe))


def _remapped(wrt: Any, stages: Sequence[int]) -> Any:
    """Make a filter that shows ``wrt`` the chain's stages under their indices in the model."""
    if isinstance(wrt, type) and issubclass(wrt, nnx.Param):
        return wrt
    asks = nnx.filterlib.to_predicate(wrt)

    def asked(path: Any, value: Any) -> bool:
        if path[:1] == ("stages",):
            path = ("stages", stages[path[1]], *path[2:])
        return bool(asks(path, value))

    return asked


def timetable(
    num_stages: int, kinds: str, microbatches: int, in_flight: int, num_slices: int = 1
) -> Schedule:
    """Schedule one rank: forwards through all stages, backwards ``in_flight`` microbatches later.

    W actions run as many microbatches after their I actions. So the values that an action reads
    were written as long ago as in a real step, and are in no cache. Slices of a microbatch follow
    each other.
    """
    there = range(num_stages)
    order: list[str] = []

    def back(kind: str, m: int) -> list[str]:
        parts = reversed(_units(m, num_slices))
        return [f"{k}{kind}{unit}" for unit in parts for k in reversed(there)]

    for m in range(microbatches + 2 * in_flight - 1):
        behind, late = m - in_flight, m - 2 * in_flight + 1
        if 0 <= behind < microbatches:
            order += back(kinds[1], behind)
        if kinds[2:] and 0 <= late < microbatches:
            order += back(kinds[2], late)
        if m < microbatches:
            order += [f"{k}F{unit}" for unit in _units(m, num_slices) for k in there]
    return from_orders([order], name="one by one")


def _units(microbatch: int, num_slices: int) -> list[str]:
    """List the units of a microbatch: the microbatch itself, or its slices."""
    if num_slices == 1:
        return [str(microbatch)]
    return [f"{microbatch}.{part}" for part in range(num_slices)]


def entries(
    program: Program, chunks: Collection[int], kinds: str = "FBIW", *, rank: int | None = None
) -> Runs:
    """Mark the entries of some kinds of action of some chunks, on every rank or on one."""
    runs = np.zeros_like(program.op, bool)
    ranks = slice(None) if rank is None else rank
    for index, slot in enumerate(program.slots):
        for branch, op in enumerate(slot.ops, start=1):
            if op.chunk in chunks and op.kind in kinds:
                runs[:, index, ranks] |= program.op[:, index, ranks] == branch
    return runs


def first_and(program: Program, runs: Runs | None = None, part: int | None = None) -> Runs:
    """Mark all entries of the first microbatch; also ``runs``, or only slice ``part`` of them."""
    N = program.schedule.num_slices
    first = (program.microbatch < N) & (program.op > 0)  # a microbatch has N units
    if runs is None:
        return first
    return first | (runs if part is None else runs & (program.microbatch % N == part))


def operands_of(pipe: Any, inputs: Tree, targets: Tree, extras: Any = None) -> Operands:
    """Collect the kernel's arguments of a training step, except its plan."""
    plan, state = pipe.plan, (pipe.chunks, pipe.ends)
    options: dict[str, Any] = {"wrt": plan.wrt, "has_aux": None}
    found = make_operands(plan, *state, inputs, targets, extras, "calibrate", **options)
    model, weights, batch = found
    return model, meshes.untyped(weights, plan.mesh), batch


def partial_step(plan: Plan, operands: Operands) -> Callable[[Any], Any]:
    """Make the training step of a pipeline, as a function of the table entries to run."""

    def run(runs: Any) -> Any:
        with meshes.entered(plan.mesh, plan.home):
            return runtime.train(plan, *operands, runs=runs)

    return run


def rows_of(leaf: Any, plan: Plan, num_microbatches: int) -> Any:
    """Repeat the given microbatches up to the number of microbatches to time."""
    shards, given = plan.axes.num_rows, plan.schedule.num_microbatches
    each = leaf.shape[0] // given
    if num_microbatches <= given and shards == 1:
        return leaf[: num_microbatches * each]
    kept = np.arange(num_microbatches * each) % (each * given)
    return np.asarray(leaf)[kept]
