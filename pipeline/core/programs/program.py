"""The programs of a rank: its actions, and the program before the first action.

Each program is traced on a rank's abstract mesh, and lowered once for all ranks that run it. XLA
compiles it for the devices of each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import vary
from collectives.compat import lower_without_devices
from collectives.transfer import typed
from pipeline.base.tree import Tree, blank, vary_like
from pipeline.core.programs.meshes import add_device_axis, drop_device_axis
from pipeline.core.programs.operands import Operands
from pipeline.core.programs.traced import Traced
from pipeline.core.step.stores.store import ActionValues
from schedules.lowering.kinds import VALUE_KINDS
from schedules.lowering.program import Op

Names = Sequence[str]
_PLACES = {kind.name: 0 for kind in VALUE_KINDS}  # a program has one value of each kind


@dataclass(frozen=True, eq=False)
class RankProgram:
    """A function of a rank's arrays, which can be compiled for the devices of any rank.

    Args:
      results: the specs of the results between programs, which also name the compiler's axes.
      donated: the arguments whose memory the results may reuse.
    """

    operands: Operands
    body: Callable[..., Any]
    in_specs: Any
    types: Any
    out_specs: Any
    results: Any
    donated: tuple[int, ...] = ()

    def lower(self, rank: int) -> Callable[[], Any]:
        """Lower the function for a rank's devices; a call of the result compiles it."""
        meshes = self.operands.meshes
        if self._shared is not None:
            devices = meshes.devices(rank)
            return functools.partial(self._shared.compile, device_assignment=devices)
        mesh = meshes.ranks[rank]
        types = jax.tree.map(lambda t: typed(mesh, t.shape, t.dtype, t.sharding.spec), self.types)
        lowered = without_warnings_of_donation(lambda: self._jitted(mesh).lower(*types))
        compile_it: Callable[[], Any] = lowered.compile
        return compile_it

    @functools.cached_property
    def _shared(self) -> jax.stages.Lowered | None:
        """The function lowered once for all ranks; None if JAX needs devices to lower it.

        JAX needs the devices if the function has callbacks, or no results with shardings.
        """
        if not jax.tree.leaves(self.results):
            return None
        platform = self.operands.options.plan.mesh.devices.flat[0].platform
        traced = self._jitted(self.operands.meshes.abstract).trace(*self.types)
        return without_warnings_of_donation(lambda: lower_without_devices(traced, platform))

    def _jitted(self, mesh: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.results)
        run = self.operands.sharded(self.body, self.in_specs, self.out_specs, mesh)
        run.__name__ = run.__qualname__ = self.body.__name__  # as HLO and profiles show it
        return jax.jit(run, out_shardings=shardings, donate_argnums=self.donated)


def without_warnings_of_donation(lower: Callable[[], Any]) -> Any:
    """Lower a function without JAX's warning about donated arguments that fit no result."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return lower()


def begin_program(traced: Traced, names: Names) -> RankProgram:
    """Make the program before a rank's first action, from operands to (sums, `Traced.shared`).

    The sums also have, by name, the weights that the step makes once.

    Args:
      names: the names of the rank's sums, which start as zeros, and of its declared state.
    """
    operands, meshes = traced.operands, traced.operands.meshes
    sums = {name: traced.sums[name] for name in names}
    types = sums | traced.made

    def begin(leaves: list[Any]) -> Any:
        program = traced.open(*operands.of(leaves))
        once = program.step.once
        results = program.get(sums) | (once.weights or {})
        return leaving(results, dataclasses.replace(once, weights=None), types, traced.shared)

    out_specs = meshes.value_specs((types, traced.shared))
    results = operands.sum_specs(types), out_specs[1]
    return RankProgram(operands, begin, (operands.manual,), (operands.types,), out_specs, results)


def action_program(
    traced: Traced, op: Op, stage: int, names: Names, read: Names, written: Names
) -> RankProgram:
    """Make the program of an action; equal stages share the program.

    It maps ``(sums, values, microbatch, operands, shared, made)`` to ``(sums, values)``. It adds to
    the sums in their memory. The values are dicts, by kind, of the values that it reads and writes;
    ``shared`` and ``made`` are what the step has computed once.

    Args:
      names: the sums to which the action adds.
      read: the kinds of values that the action reads.
      written: the kinds of values that the action writes.
    """
    operands, types, meshes = traced.operands, traced.stages[stage], traced.operands.meshes
    message = types.gradient if op.kind == "F" else types.operand
    types_of = {"stash": types.stash, "crossing": types.crossing}
    given = types_of | {"operand": types.operand, "gradient": types.gradient}
    reads = {kind: given[kind] for kind in read}
    writes = {kind: types_of.get(kind, message) for kind in written}
    sums, made = {name: traced.sums[name] for name in names}, traced.made_of(op.chunk)

    def act(of_sums: Any, values: Any, microbatch: Any, leaves: list[Any], *once: Any) -> Any:
        shared = dataclasses.replace(drop_device_axis(once[0]), weights=entering(once[1], made))
        program = traced.open(*operands.of(leaves), shared)
        program.put(entering(of_sums, sums))
        no_gradient = blank(types.gradient, traced.options.plan.axes.varying)
        stores = ActionValues({"gradient": no_gradient, **drop_device_axis(values)})
        actions = program.actions(stage, stores, op.kind)
        row = {"microbatch": vary(microbatch, actions.rank.axes), **_PLACES}
        sent = actions.run_op(op, row)
        results = {"operand": sent, "gradient": sent, **stores.written}
        results = {kind: results[kind] for kind in writes}
        return leaving(program.get(sums), results, sums, writes)

    act.__name__ = op.label
    number = jax.ShapeDtypeStruct((), jnp.int32)
    specs_of = meshes.value_specs
    once = specs_of((traced.shared, made))
    in_specs = *specs_of((sums, reads)), P(), operands.manual, *once
    in_types = (
        operands.sum_types(sums),
        meshes.value_types(reads),
        meshes.types(number, P()),
        operands.types,
        meshes.value_types(traced.shared),
        operands.sum_types(made),
    )
    out_specs = specs_of((sums, writes))
    results = operands.sum_specs(sums), out_specs[1]
    # A backward is the last reader of its values, so it may reuse their memory.
    donated = (0,) if op.kind == "F" else (0, 1)
    return RankProgram(operands, act, in_specs, in_types, out_specs, results, donated)


def entering(sums: Tree, types: Tree) -> Tree:
    """Drop the device axis of scalar sums that enter a program."""
    return jax.tree.map(lambda x, t: x if t.shape else x[0], sums, types)


def leaving(sums: Tree, others: Tree, sum_types: Tree, other_types: Tree) -> tuple[Tree, Tree]:
    """Cast values to their types, and add device axes: to scalars among the sums, and to others."""
    sums = jax.tree.map(
        lambda x, t: x if t.shape else x[None], vary_like(sums, sum_types), sum_types
    )
    return sums, add_device_axis(vary_like(others, other_types))
