"""The programs of a rank: its actions, and what comes before the first.

Each is traced on a rank's abstract mesh, and lowered once for all ranks that run it; XLA compiles
it for the devices of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import vary
from collectives.compat import lower_without_devices
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree, blank, vary_like
from pipeline.core.model.model import Batch, Weights
from pipeline.core.placement.zero import kernel_spec
from pipeline.core.programs.meshes import RankMeshes, add_device_axis, drop_device_axis, typed
from pipeline.core.programs.traced import (
    ActionValues,
    OpenStep,
    StepInputs,
    StepOptions,
    Traced,
    first_loss,
    trace,
    whole_loss,
)
from pipeline.core.step.ranks import gradient_specs, manual, weight_specs
from schedules.lowering.kinds import VALUE_KINDS
from schedules.lowering.program import Op

_PLACES = {kind.name: 0 for kind in VALUE_KINDS}  # a program has one value of each kind


@dataclass(frozen=True, eq=False)
class Operands:
    """The types of a step's operands, weights, batch and `StepInputs`, as one list of leaves.

    A step passes them to each of its programs. JAX flattens a list ten times faster than states.

    Attributes:
      options: of the step.
      meshes: of the ranks.
      tree: the structure of the operands.
      specs: the specs of the leaves on the pipeline's mesh.
      types: the types of a rank's parts.
      shapes: the shapes of the leaves on the pipeline's mesh.
    """

    options: StepOptions
    meshes: RankMeshes
    tree: Any
    specs: list[P]
    types: list[Any]
    shapes: list[tuple[int, ...]]

    @property
    def manual(self) -> list[P]:
        """The specs within a shard_map."""
        specs: list[P] = manual(self.options.plan, self.specs)
        return specs

    def sum_specs(self, sums: dict[str, Leaves]) -> dict[str, list[P]]:
        """The specs of sums between programs.

        A compiler that divides a weight divides its gradient too: no device has a sum whole. Its
        axes come after those of a shard_map, for which a device's block is contiguous.

        Args:
          sums: types, by name.
        """
        plan, model = self.options.plan, self.options.model
        specs: dict[str, list[P]] = self.meshes.value_specs(sums)
        if not (plan.auto_axes and self.options.request.training):
            return specs
        chunks, ends = gradient_specs(model)
        # A chunk's leaf has an axis of ranks first, which its sum lacks.
        of = {f"chunk{v}": [P(*spec[1:]) for spec in chunk] for v, chunk in enumerate(chunks)}
        of |= {f"ends{n}": [spec] for n, spec in enumerate(ends)}
        for name in specs.keys() & of:
            parts = [kernel_spec(spec, frozenset(plan.auto_axes)) for spec in of[name]]
            pairs = zip(specs[name], parts, strict=True)
            specs[name] = [
                P((*axes_in(lead[0]), *axes_in(part[0] if part else None)), *part[1:])
                for lead, part in pairs
            ]
        return specs

    def sum_types(self, sums: dict[str, Leaves], mesh: Any = None) -> dict[str, list[Any]]:
        """The types of sums that enter and leave a program; on a mesh, as of `RankMeshes.join`.

        The sums of all devices are concatenated along the first axis, and only a scalar gets a new
        one, unlike other values (`RankMeshes.value_specs`). So the shape within a program is that
        of its argument, and XLA adds in place; else it copies (CPUs, jaxlib 0.10.2 and 0.12).
        """
        mesh = self.meshes.abstract if mesh is None else mesh

        def sum_type(t: Any, lead: P, spec: P) -> jax.ShapeDtypeStruct:
            first, *rest = t.shape or (1,)
            count = math.prod(mesh.shape[axis] for axis in axes_in(lead[0]))
            return typed(mesh, (count * first, *rest), t.dtype, spec)

        return jax.tree.map(sum_type, sums, self.meshes.value_specs(sums), self.sum_specs(sums))

    def whole_types(self, mesh: Mesh) -> list[Any]:
        """The types of the leaves on a mesh."""
        whole = zip(self.shapes, self.types, self.specs, strict=True)
        return [typed(mesh, shape, t.dtype, spec) for shape, t, spec in whole]

    def of(self, leaves: list[Any]) -> tuple[Weights, Batch, StepInputs]:
        """The operands that have these leaves."""
        operands: tuple[Weights, Batch, StepInputs] = jax.tree.unflatten(self.tree, leaves)
        return operands

    def sharded(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Any = None
    ) -> Any:
        """A body on every device of a rank."""
        plan = self.options.plan
        return jax.shard_map(
            body,
            mesh=self.meshes.abstract if mesh is None else mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=plan.axes.manual,
            check_vma=plan.tracks_varying,
        )


@dataclass(frozen=True, eq=False)
class RankProgram:
    """A function of the arrays of a rank, to be compiled for the devices of any.

    Args:
      operands: of the step.
      body: what each device computes.
      in_specs: the specs of its arguments.
      types: the types of its arguments.
      out_specs: the specs of its results.
      results: their specs between programs, which name axes of the compiler too.
      donated: the arguments whose memory it may reuse.
    """

    operands: Operands
    body: Callable[..., Any]
    in_specs: Any
    types: Any
    out_specs: Any
    results: Any
    donated: tuple[int, ...] = ()

    def lower(self, rank: int) -> Callable[[], Any]:
        """The function lowered for a rank's devices; a call compiles it."""
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
        """Lowered once for all ranks; None if it holds callbacks, which JAX lowers for devices."""
        platform = self.operands.options.plan.mesh.devices.flat[0].platform
        traced = self._jitted(self.operands.meshes.abstract).trace(*self.types)
        return without_warnings_of_donation(
            functools.partial(lower_without_devices, traced, platform)
        )

    def _jitted(self, mesh: Any) -> Any:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.results)
        run = self.operands.sharded(self.body, self.in_specs, self.out_specs, mesh)
        run.__name__ = run.__qualname__ = self.body.__name__  # as HLO and profiles show it
        return jax.jit(run, out_shardings=shardings, donate_argnums=self.donated)


def without_warnings_of_donation(lower: Callable[[], Any]) -> Any:
    """Lower a function some of whose donated arguments may fit none of its results."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return lower()


def find_operands(
    options: StepOptions, weights: Weights, batch: Batch, given: StepInputs
) -> Operands:
    """The types and specs of a step's operands."""
    meshes = RankMeshes(options.plan)
    leaves, tree = jax.tree.flatten((weights, batch, given))
    everywhere = jax.tree.map(lambda _: P(), given)
    specs = jax.tree.leaves((weight_specs(options.model, weights), batch.spec_tree(), everywhere))
    shapes = [tuple(x.shape) for x in leaves]
    return Operands(options, meshes, tree, specs, meshes.types(leaves, specs), shapes)


def trace_model(operands: Operands) -> Traced:
    """Trace the model on a rank."""
    results = []

    def body(leaves: list[Any]) -> None:
        results.append(trace(operands.options, *operands.of(leaves)))

    jax.eval_shape(operands.sharded(body, (operands.manual,), None), operands.types)
    return results[0]


@dataclass(frozen=True, eq=False)
class RankModel:
    """The model as a rank has it.

    Attributes:
      operands: the types of the step's operands there.
      traced: the model, traced on the rank's abstract mesh.
    """

    operands: Operands
    traced: Traced


def rank_models(
    options: StepOptions, weights: Weights, batch: Batch, given: StepInputs
) -> list[RankModel]:
    """[S] the model of each rank, traced once for all whose meshes are alike."""
    known: dict[Any, RankModel] = {}
    for plan in options.plan.of_ranks:
        if plan.mesh.abstract_mesh not in known:
            of_rank = dataclasses.replace(options, plan=plan)
            operands = find_operands(of_rank, weights, batch, given)
            known[plan.mesh.abstract_mesh] = RankModel(operands, trace_model(operands))
    return [known[plan.mesh.abstract_mesh] for plan in options.plan.of_ranks]


def begin_program(traced: Traced, operands: Operands, sums: dict[str, Leaves]) -> RankProgram:
    """The program before a rank's first action: operands to (sums, factors of losses).

    Args:
      traced: the model.
      operands: of the step.
      sums: the types of those that the rank has; they begin as zeros, declared state as it is.
    """
    options, meshes = traced.options, operands.meshes

    def begin(leaves: list[Any]) -> Any:
        weights, batch, given = operands.of(leaves)
        inspected = traced.on_rank(weights, batch, first_loss(options, given))
        loss, _ = whole_loss(options, inspected, given)
        factors = {name: getattr(loss, name) for name in traced.factors}
        rank = dataclasses.replace(inspected.rank, loss=loss)
        step = OpenStep(options, dataclasses.replace(inspected, rank=rank))
        return leaving(step.get(sums), factors, sums, traced.factors)

    out_specs = meshes.value_specs((sums, traced.factors))
    results = operands.sum_specs(sums), out_specs[1]
    return RankProgram(operands, begin, (operands.manual,), (operands.types,), out_specs, results)


def action_program(
    traced: Traced, operands: Operands, op: Op, stage: int, names: Sequence[str]
) -> RankProgram:
    """The program of an action, the same for all stages that are alike.

    ``(sums, values, microbatch, operands, factors)`` to ``(sums, values)``: the sums that it adds
    to, whose memory it reuses, and by kind the values that it reads and writes.

    Args:
      traced: the model.
      operands: of the step.
      op: the action.
      stage: of the stage.
      names: of the sums that it adds to.
    """
    meshes, types = operands.meshes, traced.stages[stage]
    message = types.gradient if op.kind == "F" else types.operand
    types_of = {"stash": types.stash, "crossing": types.crossing}
    given = types_of | {"operand": types.operand, "gradient": types.gradient}
    reads = {kind: given[kind] for kind in reads_of(traced, op, stage)}
    writes = {kind: types_of.get(kind, message) for kind in writes_of(traced, op, stage)}
    sums = {name: traced.sums[name] for name in names}

    def act(of_sums: Any, values: Any, microbatch: Any, leaves: list[Any], factors: Any) -> Any:
        weights, batch, _ = operands.of(leaves)
        step = traced.opened(weights, batch, drop_device_axis(factors))
        step.put(entering(of_sums, sums))
        no_gradient = blank(types.gradient, traced.options.plan.axes.varying)
        stores = ActionValues({"gradient": no_gradient, **drop_device_axis(values)})
        actions = step.actions(stage, stores, op.kind)
        row = {"microbatch": vary(microbatch, actions.local.axes), **_PLACES}
        sent = actions.run_op(op, row)
        results = {"operand": sent, "gradient": sent, **stores.written}
        results = {kind: results[kind] for kind in writes}
        return leaving(step.get(sums), results, sums, writes)

    act.__name__ = op.label
    number = jax.ShapeDtypeStruct((), jnp.int32)
    of_values, others = meshes.value_specs((sums, reads)), meshes.value_specs(traced.factors)
    in_specs = *of_values, P(), operands.manual, others
    of_sums = operands.sum_specs(sums)
    of_rank = meshes.types(number, P()), operands.types, meshes.value_types(traced.factors)
    in_types = operands.sum_types(sums), meshes.value_types(reads), *of_rank
    out_specs = meshes.value_specs((sums, writes))
    results = of_sums, out_specs[1]
    # A backward is the last reader of all that it reads.
    donated = (0,) if op.kind == "F" else (0, 1)
    return RankProgram(operands, act, in_specs, in_types, out_specs, results, donated)


def entering(sums: Tree, types: Tree) -> Tree:
    """Drop the device axis of scalar sums that enter a program."""
    return jax.tree.map(lambda x, t: x if t.shape else x[0], sums, types)


def leaving(sums: Tree, others: Tree, sum_types: Tree, other_types: Tree) -> tuple[Tree, Tree]:
    """Sums and other values, of these types, with the device axes with which they leave a program.

    Of sums, scalars alone have one.
    """
    sums = jax.tree.map(
        lambda x, t: x if t.shape else x[None], vary_like(sums, sum_types), sum_types
    )
    return sums, add_device_axis(vary_like(others, other_types))


def reads_of(traced: Traced, op: Op, stage: int) -> tuple[str, ...]:
    """The kinds of values that an action reads."""
    if op.kind == "W":
        return ("crossing",)
    operand = () if op.first else ("operand",)
    if op.kind == "F":
        return operand
    # The last stage's backward starts from its own output, where F has left it. A stage that adds
    # losses has a backward also where no gradient comes back to it.
    residuals = traced.options.keeps_residuals
    has_message = residuals if op.last else traced.stages[stage + 1].sends
    gradient = ("gradient",) if has_message else ()
    return (*(("stash",) if residuals else operand), *gradient)


def writes_of(traced: Traced, op: Op, stage: int) -> dict[str, int]:
    """The kinds of values that an action writes, and the stage that reads each."""
    keeps = traced.options.keeps_residuals
    if op.kind == "F":
        message = {"gradient": stage} if op.last and keeps else {}
        message = message if op.last else {"operand": stage + 1}
        return message | ({"stash": stage} if keeps else {})
    if op.kind == "W":
        return {}
    message = {"gradient": stage - 1} if traced.stages[stage].sends else {}
    return message | ({"crossing": stage} if op.kind == "I" else {})


def sums_of(traced: Traced, op: Op, rank: int) -> tuple[str, ...]:
    """The names of what an action of a rank may add to or write: sums, and declared state."""
    facts, training = traced.inspected.rank.facts, traced.options.request.training
    parts: tuple[str, ...] = ("state",)
    names = set[str]()
    if op.kind == "F":
        names |= set(facts.stage_sums)
    else:
        names.add(f"chunk{op.chunk}")
    if facts.adds and (op.kind != "F" or not training):
        names.add("added")
    # Head and loss run in the last stage's backward, or in its F if there is none; embed is
    # differentiated in the first stage's backward.
    if op.kind in ("B", "I") if training else op.kind == "F":
        names |= {"loss", "weight", "metrics", "results"} if op.last else set()
        names |= {"inputs"} if op.first else set()
        parts += ("ends",) if op.first or op.last else ()
    return tuple(
        name
        for name, types in traced.sums_on(rank).items()
        if types and (name in names or name.startswith(parts))
    )
