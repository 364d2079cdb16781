"""Durations of a pipeline's actions on absent chips, estimated by their compiler.

A step of the pipeline's own stages is compiled for a described slice, every microbatch through all
stages and back, once with whole backwards and once with halves, and its cycles are read
(`pipeline.insight.calibrate.cycles`). Nothing is allocated and nothing runs.

Letters: S ranks, K stages, M microbatches, N rows of a batch, D data shards.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from collectives import make_mesh
from pipeline.base.chips import CHIPS, Chip, known
from pipeline.base.tree import Tree, shape_text
from pipeline.core.jaxpr.scopes import COPIED, MOVED, trips
from pipeline.core.layerwise.replace import ends_of
from pipeline.core.model.microbatch import map_rows
from pipeline.core.options.plan import Plan
from pipeline.insight.calibrate.calibration import Calibration
from pipeline.insight.calibrate.conclude import CalibrationError
from pipeline.insight.calibrate.cycles import (
    AROUND,
    EFFICIENCY,
    ONCE,
    Cycles,
    Machine,
    Scope,
    cycles,
)
from schedules import Costs, Schedule, from_orders
from schedules.core.action import KINDS as ACTIONS
from schedules.core.action import Kind
from schedules.lowering.program import COMMON, Op

# What libtpu else asks the machine it is on for, which is none of Google's.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# What an error says where another process has loaded libtpu, or was killed while it did.
LOCKED = "lockfile", "already in use"
MICROBATCHES = 2  # of the step that is compiled: what one takes does not depend on how many follow
KINDS = "FB", "FIW"


def find_slice(topology: Any) -> tuple[Chip, list[Any]]:
    """A TPU slice that is described: its kind of chip, and its devices.

    Args:
      topology: "v5p:4x4x4", a chip of the table and how many there are along each axis.

    Raises:
      ImportError: libtpu is not installed.
      RuntimeError: another process has it loaded.
      ValueError: no such chip, or a slice that the compiler does not know.
    """
    what = f"topology={topology!r}"
    name, colon, shape = topology.partition(":") if isinstance(topology, str) else ("", "", "")
    chip, knows = CHIPS.get(name), [c.name for c in CHIPS.values() if c.clock is not None]
    if not colon or not shape or chip is None or chip.clock is None:
        raise ValueError(
            f"{what}: must be a TPU and the shape of a slice, such as 'v5p:4x4x4' or 'v5e:2x4'; "
            f"{known(name if name not in knows else '', knows)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"{what}: to compile for a TPU that is not there takes its compiler, libtpu; pip "
            f"install 'shardpipe[tpu]', into an environment of its own, for beside jax it looks "
            f"for a TPU at every import unless JAX_PLATFORMS=cpu is set"
        )
    try:
        with _told():
            found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        if any(word in str(error) for word in LOCKED):
            raise RuntimeError(
                f"{what}: another process of this machine has the TPU compiler loaded, and libtpu "
                f"allows one; wait until it has ended, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 where "
                f"no TPU is to be shared: compiling needs none"
            ) from error
        raise ValueError(
            f"{what}: the TPU compiler (libtpu {metadata.version('libtpu')}) does not know this "
            f"slice: {str(error).splitlines()[0][:200]}; give a shape that is sold, such as "
            f"'v5p:2x2x1', 'v5p:4x4x4', 'v5e:2x4', 'v6e:8x8'"
        ) from error
    return chip, list(found.devices)


@contextmanager
def _told() -> Iterator[None]:
    """Tell libtpu, as it loads, what it would ask of a TPU's machine."""
    told = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            os.environ.pop(name, None)


def machine_of(chip: Chip, mesh: Mesh, devices: list[Any]) -> Machine:
    """Make the machine that turns bytes into cycles for programs on a mesh.

    Args:
      chip: of what kind they are.
      mesh: of the program.
      devices: of the whole slice.
    """
    places = np.array([device.coords for device in mesh.devices.flat], np.int64)
    whole = np.array([device.coords for device in devices], np.int64)
    return Machine(chip, places, tuple((whole.max(axis=0) + 1).tolist()))


def calibrate_for(
    pipe: Any,
    make: Callable[..., Any],
    inputs: Tree,
    targets: Tree,
    extras: Any,
    *,
    topology: str,
    split: bool,
    message: Callable[[], int],
) -> Calibration:
    """Estimate the durations of the actions of a pipeline of class ``make`` on a described slice.

    ``message()`` is how many bytes a message between its stages has. Other arguments are those of
    `pipeline.Pipeline.calibrate`.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: an unknown slice, or one smaller than the pipeline's mesh.
      CalibrationError: the compiler wrote no cycles, or the step does not compile.
    """
    chip, devices = find_slice(topology)
    plan = pipe.plan
    mesh = _laid_out(plan, topology, devices)
    machine = machine_of(chip, mesh, devices)
    inputs, targets, extras = map_rows(
        plan.axes,
        lambda leaf: _rows(leaf, plan),
        *(inputs, targets, extras),
        whole=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    )
    halves: Costs | None = None
    for kinds in reversed(KINDS[: 1 + split]):  # whole backwards last: what they say of F counts
        one = typed(pipe, make, mesh, timetable(plan.schedule, kinds))
        read = cycles(compile_step(one, inputs, targets, extras, topology), machine)
        costs = costs_of(read, one.plan, machine, message())
        halves = costs if kinds != KINDS[0] else halves
    if not any(costs.b):  # type: ignore[arg-type]
        raise CalibrationError(
            "the compiled step has none of the kernel's name scopes (such as "
            "'ticks0_38/slot1/B0_last'), or nothing in them takes time; compile without XLA flags "
            "that drop op_name, and stages that compute something"
        )
    if halves is None:  # so nothing is gained by splitting a backward
        costs = replace(costs, i=costs.b or 0.0, w=(0.0,) * plan.schedule.num_stages)
    else:
        costs = replace(costs, i=halves.i, w=halves.w)
    return _calibration(plan, costs, read, machine, topology, inputs, mesh.size)


def _laid_out(plan: Plan, topology: str, devices: list[Any]) -> Mesh:
    """The pipeline's mesh on a slice, or on the first of its chips.

    Raises:
      ValueError: it has too few.
    """
    mesh, sizes = plan.mesh, dict(plan.mesh.shape)
    if mesh.size > len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"topology={topology!r}: the slice has {len(devices)} devices, and this pipeline's "
            f"mesh {mesh.size} ({shape}); give a topology of {mesh.size} devices or more, or "
            f"calibrate pipe.replace(mesh=make_mesh(...)) of fewer"
        )
    if mesh.size == len(devices):
        found = make_mesh(devices=devices, **sizes).devices
        order = list(make_mesh(devices=devices, **sizes).axis_names)
        found = found.transpose([order.index(axis) for axis in mesh.axis_names])
    else:
        found = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
    return Mesh(found, mesh.axis_names, axis_types=mesh.axis_types)


def timetable(schedule: Schedule, kinds: str) -> Schedule:
    """All microbatches forward, then each back, stages where a schedule has them."""
    orders: list[list[str]] = [[] for _ in range(schedule.num_ranks)]
    stages = range(schedule.num_stages)
    for m in range(MICROBATCHES):
        for k in stages:
            orders[schedule.placement[k]].append(f"{k}F{m}")
    for m in range(MICROBATCHES):
        for k in reversed(stages):
            orders[schedule.placement[k]] += [f"{k}{kind}{m}" for kind in kinds[1:]]
    return from_orders(orders, name="forth and back", placement=schedule.placement)


def typed(pipe: Any, make: Callable[..., Any], mesh: Mesh, schedule: Schedule) -> Any:
    """A pipeline of the types of another's stages, on another mesh and with another timetable."""
    options = pipe.plan.options.to_dict() | {
        "mesh": mesh,
        "num_microbatches": schedule.num_microbatches,
        "schedule": schedule,
        "bubbles": "skip",
        "pattern": "single",
        "delayed": False,
        "offload": None,
        "costs": None,
    }
    ends = {name: _types(end) for name, end in ends_of(pipe).items()}
    with warnings.catch_warnings():  # whoever made the pipeline has seen them
        warnings.simplefilter("ignore")
        return make([_types(stage) for stage in pipe.stages()], **options | ends)


def _types(module: Any) -> Any:
    """A module with types for its arrays; what is no module as it is."""
    if not isinstance(module, nnx.Module):
        return module
    graphdef, state = nnx.split(module)

    def one(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return nnx.merge(graphdef, jax.tree.map(one, state))


def _rows(leaf: Any, plan: Plan) -> jax.ShapeDtypeStruct:
    """The type of a batch of as many microbatches as are compiled."""
    each = leaf.shape[0] // plan.schedule.num_microbatches
    return jax.ShapeDtypeStruct((MICROBATCHES * each, *leaf.shape[1:]), leaf.dtype)


def compile_step(pipe: Any, inputs: Tree, targets: Tree, extras: Any, topology: str) -> str:
    """The optimised HLO of a training step.

    Raises:
      CalibrationError: it does not compile, as when it does not fit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = pipe.lower(inputs, targets, extras=extras)
    try:
        return lowered.compile().as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise CalibrationError(
            f"the TPU compiler does not compile a step of {MICROBATCHES} microbatches for "
            f"{topology}: {str(error).strip().splitlines()[0][:300]}; where memory is short take "
            f"more ranks, smaller microbatches, or another remat"
        ) from error


def costs_of(read: Mapping[Scope, Cycles], plan: Plan, machine: Machine, message: float) -> Costs:
    """Seconds of every action in a compiled step, the I and W of one without them nothing.

    Args:
      read: its cycles.
      plan: of the pipeline whose step it is.
      machine: for which it was compiled.
      message: bytes of a message between ranks.
    """
    stages, clock = range(plan.schedule.num_stages), machine.clock
    of = {kind: [_of_stage(read, plan, k, kind) / clock for k in stages] for kind in ACTIONS}
    common = {
        name: max((c.total for s, c in read.items() if s.action == name), default=0.0)
        for name in COMMON
    }
    shared = {name: plan.schedule.num_ranks * each / clock for name, each in common.items()}
    return Costs(
        of["F"],
        of["I"],
        of["W"],
        b=of["B"],
        comm=0.0 if plan.schedule.num_ranks == 1 else message / machine.chip.link,
        head=shared["head"],
        embed=(shared["lookup"] + shared["scatter"]) / 2,
    )


def beside(read: Mapping[Scope, Cycles], plan: Plan, machine: Machine) -> float:
    """Seconds of a step outside of its actions: in each of its ticks, and once."""
    around = [each.total for scope, each in read.items() if scope.action == AROUND]
    once = sum(each.total for scope, each in read.items() if scope.action == ONCE)
    return (once + len(plan.training.op) * max(around, default=0.0)) / machine.clock


def _of_stage(read: Mapping[Scope, Cycles], plan: Plan, k: int, kind: Kind) -> float:
    """Read the cycles of one action of a stage; zero if the program has no such action.

    An action beside which something is copied, gathered or shared out has code of its own. What is
    moved once for a run of microbatches is spread over the actions of its stage; of those that copy
    from or to host memory the slowest counts.
    """
    program, rank = plan.training, plan.schedule.placement[k]
    chunk = plan.schedule.stages_of[rank].index(k)
    label = Op(kind, chunk, *program.ends_of(k)).label
    pattern = re.compile(rf"({label}{COPIED}){MOVED}")
    runs: dict[str, list[tuple[int, float]]] = {}
    for scope, each in read.items():
        found = pattern.fullmatch(scope.action)
        if found and (not scope.stages or k in scope.stages):
            count = trips(program, f"{scope.ticks}/{scope.slot}/{scope.action}")
            times = 1 if count is None else int(count[rank])
            runs.setdefault(found[1], []).append((times, each.total))
    means = []
    for group in runs.values():
        times, cycles = np.array(group).T
        means.append(float(np.average(cycles, weights=times if times.any() else None)))
    return max(means, default=0.0)


def _calibration(
    plan: Plan,
    costs: Costs,
    read: Mapping[Scope, Cycles],
    machine: Machine,
    topology: str,
    inputs: Tree,
    devices: int,
) -> Calibration:
    """Costs, and what is to be known about them."""
    K = plan.schedule.num_stages
    leaf = jax.tree.leaves(inputs)[0]
    rows = leaf.shape[0] // MICROBATCHES // plan.axes.num_rows
    actions = [each for scope, each in read.items() if scope.action not in (AROUND, ONCE)]
    total = sum(each.total for each in actions)
    return Calibration(
        costs,
        dict.fromkeys("fbiw", (0.0,) * K) | {"comm": (0.0,)},
        beside(read, plan, machine),
        plan.signature,
        shape_text(jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)),
        0,
        0,
        {
            "device": machine.chip.name,
            "platform": "tpu",
            "devices": devices,
            "cpus": os.cpu_count() or 1,
            "topology": topology,
            "clock": machine.clock,
            "kernel_efficiency": EFFICIENCY,
            "kernels": sum(each.kernels for each in actions) / total,
            "waits": sum(each.waits for each in actions) / total,
        },
        {
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "libtpu": metadata.version("libtpu"),
            "python": platform.python_version(),
            "shardpipe": metadata.version("shardpipe"),
        },
    )
