"""The programs of a step: actions of a rank, what comes before them, and work of all ranks.

A rank's program is traced on its abstract mesh, and lowered once for all ranks that run it. XLA
compiles it for the devices of each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from collectives import vary
from collectives.compat import live, lower_without_devices
from collectives.transfer import typed
from pipeline.base.tree import Tree, blank, vary_like
from pipeline.core.programs.meshes import add_device_axis, drop_device_axis
from pipeline.core.programs.operands import Argument, Operands
from pipeline.core.programs.traced import Traced
from pipeline.core.step.run.vocabulary import VocabularyParallel
from pipeline.core.step.stores.store import ActionValues
from schedules.lowering.kinds import VALUE_KINDS
from schedules.lowering.program import Op

Where = int | None  # the rank that runs a program; None for a program that has a mesh of its own
Names = Sequence[str]
Reads = Sequence[tuple[str, bool]]
_MESSAGES = "operand", "gradient"
_PLACES = {kind.name: 0 for kind in VALUE_KINDS}  # of values of which a program has one


@dataclass(eq=False)
class StepProgram:
    """A function of a rank's arrays, compiled for any rank; or of all ranks' arrays, on ``mesh``.

    It is called with only those leaves of the step's operands that it reads.

    Args:
      out_specs: the specs of the results within the shard_map.
      results: their specs between programs, which also name the compiler's axes; None if the
        compiler chooses.
      leaves_at: the number of the argument that has the leaves of the operands.
      donated: the arguments whose memory the results may reuse.
      mesh: the mesh of a program that runs on one mesh only: that of all ranks, or of a rank's
        finish; None for a program that any rank may run.

    Attributes:
      reads: the numbers of the leaves that the function reads, set by `lower`.
    """

    operands: Operands
    body: Callable[..., Any]
    arguments: Sequence[Argument]
    out_specs: Any
    results: Any
    leaves_at: int = 0
    donated: tuple[int, ...] = ()
    mesh: Mesh | None = None
    reads: list[int] = field(default_factory=list)

    @property
    def types(self) -> list[Any]:
        return [types for _, types in self.arguments]

    def lower(self) -> Callable[[Any], Callable[[], Any]]:
        """Lower the function once for all ranks; return what a rank calls to compile it.

        If JAX needs devices to lower it, it is lowered for each rank: if it has callbacks, or no
        results with shardings. A program of all ranks is lowered on its mesh.
        """
        meshes, shared = self.operands.meshes, None
        if self.mesh is None and jax.tree.leaves(self.results):
            platform = self.operands.options.plan.mesh.devices.flat[0].platform
            traced, self.reads = self._traced(meshes.abstract, self.types)
            shared = without_warnings_of_donation(lambda: lower_without_devices(traced, platform))

        def lower_for(rank: int) -> Callable[[], Any]:
            if shared is None:
                lowered, self.reads = self._lower_on(rank)
                return lowered.compile
            return functools.partial(shared.compile, device_assignment=meshes.devices(rank))

        return lower_for

    def compile(self) -> Any:
        """Compile a program that has a mesh of its own."""
        return self.lower()(None)()

    def lower_on(self, rank: Where) -> jax.stages.Lowered:
        """Lower the function for a rank's devices alone; ``reads`` stays."""
        return self._lower_on(rank)[0]

    def _lower_on(self, rank: Any) -> tuple[jax.stages.Lowered, list[int]]:
        mesh = self.mesh or self.operands.meshes.ranks[rank]
        types = jax.tree.map(lambda t: typed(mesh, t.shape, t.dtype, t.sharding.spec), self.types)
        traced, reads = self._traced(mesh, types)
        return without_warnings_of_donation(traced.lower), reads

    def _traced(self, mesh: Any, types: Any) -> tuple[jax.stages.Traced, list[int]]:
        """Trace the function without the operands' leaves that it does not read; list the others.

        JAX takes about a microsecond for each leaf of each call, also for leaves that are not read.
        """
        specs = tuple(specs for specs, _ in self.arguments)
        run = self.operands.sharded(self.body, specs, self.out_specs, mesh)
        whole = jax.jit(run).trace(*types)
        sizes = [len(jax.tree.leaves(of)) for of in types]
        keep = [n != self.leaves_at for n, size in enumerate(sizes) for _ in range(size)]
        jaxpr, is_read = live(whole.jaxpr.jaxpr, keep_inputs=keep)
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, whole.jaxpr.consts))

        def call(*args: Any) -> Any:
            return jax.tree.unflatten(whole.out_tree, function(*jax.tree.leaves(args)))

        call.__name__ = call.__qualname__ = self.body.__name__  # as HLO and profiles show it
        leaves, first = types[self.leaves_at], sum(sizes[: self.leaves_at])
        reads = [n for n in range(len(leaves)) if is_read[first + n]]
        arguments = list(types)
        arguments[self.leaves_at] = [leaves[n] for n in reads]
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.results)
        jitted = jax.jit(call, out_shardings=shardings, donate_argnums=self.donated)
        return jitted.trace(*arguments), reads


def without_warnings_of_donation(lower: Callable[[], Any]) -> Any:
    """Lower a function without JAX's warning about donated arguments that fit no result."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return lower()


def begin_program(traced: Traced, names: Names, chunks: Sequence[int | str]) -> StepProgram:
    """Make the program before a rank's first action, from operands to (sums, `Traced.shared`).

    The sums also have, by name, the weights that the step makes once.

    Args:
      names: the names of the rank's sums, which start as zeros, and of its declared state.
    """
    operands, meshes = traced.operands, traced.operands.meshes
    sums = {name: traced.sums[name] for name in names}
    types = sums | {name: of for v in chunks for name, of in traced.made_of(v).items()}

    def begin(leaves: list[Any]) -> Any:
        program = traced.open(*operands.of(leaves))
        once = program.step.once
        made = program.get(sums) | (once.weights or {})
        results = {name: made[name] for name in types}
        return leaving(results, dataclasses.replace(once, weights=None), types, traced.shared)

    out_specs = meshes.value_specs((types, traced.shared))
    results = operands.sum_specs(types), out_specs[1]
    return StepProgram(operands, begin, [operands.leaves()], out_specs, results)


def gather_program(traced: Traced, chunk: int) -> StepProgram:
    """Make the program that gathers a chunk's weights, from operands to the weights by name."""
    operands, types = traced.operands, traced.made_of(chunk)

    def gather(leaves: list[Any]) -> Any:
        made = traced.open(*operands.of(leaves)).step.once.weights or {}
        return leaving({name: made[name] for name in types}, (), types, ())[0]

    gather.__name__ = f"gather{chunk}"
    specs, results = operands.meshes.value_specs(types), operands.sum_specs(types)
    return StepProgram(operands, gather, [operands.leaves()], specs, results)


def action_program(
    traced: Traced, op: Op, stage: int, part: int, names: Names, read: Reads, written: Names
) -> StepProgram:
    """Make the program of an action; equal stages share the program.

    It maps ``(sums, last, kept, unit, operands, shared, made)`` to ``(sums, values)``. It adds to
    the sums in their memory. ``last`` and ``kept`` are dicts, by name, of the values that it reads:
    later actions read only ``kept``. ``shared`` and ``made`` are what the step has computed once.

    Args:
      part: the slice of the action.
      names: the sums to which the action adds.
      read: the names of the values that the action reads, each with whether it reads them last.
      written: the names of the values that the action writes.
    """
    operands, types, meshes = traced.operands, traced.stages[stage][part], traced.operands.meshes
    message = types.gradient if op.kind == "F" else types.operand
    last, kept = (
        {name: types.types_of(name) for name, is_last in read if is_last == wanted}
        for wanted in (True, False)
    )
    writes = {name: types.types_of(name) for name in written}
    writes |= {name: message for name in _MESSAGES if name in written}
    axes, slices = traced.options.plan.axes.varying, range(traced.options.schedule.num_slices)
    sums, made = {name: traced.sums[name] for name in names}, traced.made_for(op)

    def act(of_sums: Any, ends: Any, stays: Any, unit: Any, leaves: list[Any], *once: Any) -> Any:
        shared = dataclasses.replace(drop_device_axis(once[0]), weights=entering(once[1], made))
        program = traced.open(*operands.of(leaves), shared)
        program.put(entering(of_sums, sums))
        values = drop_device_axis(ends | stays)
        # Sums of gradients for carries begin as zeros; a slice reads only carries of earlier ones.
        zeros = {n: blank(types.carry_gradient, axes) for n in slices}
        of_slices = {"carry": {}, "carry_gradient": zeros if op.kind != "F" else {}}
        for kind, of in of_slices.items():
            of |= {n: values[f"{kind}{n}"] for n in slices if f"{kind}{n}" in values}
        stores = ActionValues({"gradient": blank(types.gradient, axes), **values}, of_slices)
        actions = program.actions(stage, part, stores, op.kind)
        places = _PLACES | dict.fromkeys(of_slices, slices)  # a carry's place is its slice
        sent = actions.run_op(op, {"microbatch": vary(unit, actions.rank.axes), **places})
        results = {**dict.fromkeys(_MESSAGES, sent), **stores.written}
        results |= {f"{kind}{n}": x for kind, of in of_slices.items() for n, x in of.items()}
        results = {name: results[name] for name in writes}
        return leaving(program.get(sums), results, sums, writes)

    act.__name__ = f"{op.label}_slice{part}" if len(slices) > 1 else op.label
    arguments = [
        operands.sums(sums),
        operands.values(last),
        operands.values(kept),
        operands.number(),
        operands.leaves(),
        operands.values(traced.shared),
        operands.sums(made),
    ]
    out_specs = meshes.value_specs((sums, writes))
    results = operands.sum_specs(sums), out_specs[1]
    # A backward may reuse the memory of the values that it reads last.
    how: Any = {"leaves_at": 4, "donated": (0,) if op.kind == "F" else (0, 1)}
    return StepProgram(operands, act, arguments, out_specs, results, **how)


def joint_program(traced: Traced, part: str, names: Names, makes: bool) -> StepProgram:
    """Make the program of a `Joint`, which all ranks run together on the pipeline's mesh.

    It maps ``(sums, values, unit, operands, shared, made)`` to ``(sums, values)``. Only one rank's
    value is read, and only one rank's result: the input or output of a stage, or a gradient for it.

    Args:
      names: the names of the sums to which it adds.
      makes: whether it returns a value.
    """
    operands, meshes, mesh = traced.operands, traced.operands.meshes, traced.options.plan.mesh
    x = traced.wire
    given, made = [] if part == "lookup" else [x], [x] * makes
    sums, weights = {name: traced.sums[name] for name in names}, traced.made_of("ends")

    def together(of_sums: Any, values: Any, unit: Any, leaves: list[Any], *once: Any) -> Any:
        shared = dataclasses.replace(drop_device_axis(once[0]), weights=entering(once[1], weights))
        program = traced.open(*operands.of(leaves), shared)
        program.put(entering(of_sums, sums))
        work = VocabularyParallel(program.step, program.sums, x)
        message = None if part == "lookup" else drop_device_axis(values[0])
        result = work.run(part, message, unit)
        return leaving(program.get(sums), [result] * makes, sums, made)

    together.__name__ = part
    arguments = [
        operands.sums(sums, mesh),
        operands.values(given, mesh),
        operands.number(mesh),
        operands.leaves(mesh),
        operands.values(traced.shared, mesh),
        operands.sums(weights, mesh),
    ]
    out_specs = meshes.value_specs((sums, made))
    how: Any = {"leaves_at": 3, "donated": (0,), "mesh": mesh}
    results = operands.sum_specs(sums), out_specs[1]
    return StepProgram(operands, together, arguments, out_specs, results, **how)


def entering(sums: Tree, types: Tree) -> Tree:
    """Drop the device axis of scalar sums that enter a program."""
    return jax.tree.map(lambda x, t: x if t.shape else x[0], sums, types)


def leaving(sums: Tree, others: Tree, sum_types: Tree, other_types: Tree) -> tuple[Tree, Tree]:
    """Cast values to their types, and add device axes: to scalars among the sums, and to others."""
    sums = jax.tree.map(
        lambda x, t: x if t.shape else x[None], vary_like(sums, sum_types), sum_types
    )
    return sums, add_device_axis(vary_like(others, other_types))
