"""The programs of a rank: its actions, what comes before the first, and what after the last.

Letters: S ranks. Each is traced on a rank's abstract mesh, and lowered once for all ranks that run
it; XLA compiles it for the devices of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import vary
from pipeline.base.tree import Leaves, vary_like
from pipeline.core.model.model import Batch, Weights
from pipeline.core.programs.meshes import RankMeshes, entered, left
from pipeline.core.programs.traced import (
    Arguments,
    StepKind,
    Traced,
    first_loss,
    make_actions,
    trace,
    whole_loss,
)
from pipeline.core.step.ranks import weight_specs
from pipeline.core.step.run.places import make_sums
from pipeline.core.step.stores.totals import StepSums
from schedules.lowering.kinds import VALUE_KINDS
from schedules.lowering.program import Op

_PLACES = {kind.name: 0 for kind in VALUE_KINDS}  # a program has one value of each kind


@dataclass(frozen=True, eq=False)
class Operands:
    """The types of what all programs of a step are given, and their specs.

    Attributes:
      meshes: of the ranks.
      types: weights, batch and the caller's scale, on a rank.
      specs: of these.
    """

    meshes: RankMeshes
    types: tuple[Weights, Batch, Any]
    specs: tuple[Any, Any, Any]


def find_operands(kind: StepKind, weights: Weights, batch: Batch, scale: Any) -> Operands:
    """The types and specs of a step's operands."""
    meshes, given = RankMeshes(kind.plan), (weights, batch, scale)
    of_scale = jax.tree.map(lambda _: P(), scale)
    specs = weight_specs(kind.plan, kind.model, weights), batch.spec_tree(), of_scale
    return Operands(meshes, meshes.types(given, specs), specs)


def trace_model(kind: StepKind, operands: Operands) -> Traced:
    """Trace the model on a rank."""
    found = []

    def body(*arguments: Any) -> None:
        found.append(trace(kind, *arguments))

    jax.eval_shape(_sharded(kind, operands, body, operands.specs, None), *operands.types)
    return found[0]


def _sharded(
    kind: StepKind, operands: Operands, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return jax.shard_map(
        body,
        mesh=operands.meshes.abstract,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=kind.plan.axes.manual,
        check_vma=kind.plan.tracks_varying,
    )


def lower_begin(traced: Traced, operands: Operands) -> jax.stages.Lowered:
    """The program before a rank's first action: its sums, which are zeros, and factors of losses.

    ``(weights, batch, scale)`` to ``(factors, sums)``.
    """
    kind, meshes = traced.kind, operands.meshes

    def body(weights: Weights, batch: Batch, scale: Any) -> Any:
        # No factor is known yet: they are found here.
        inspected = traced.on_rank(weights, batch, {})
        rank = dataclasses.replace(inspected.rank, loss=first_loss(kind, scale))
        loss = whole_loss(kind, inspected.on(rank))
        sums = make_sums(inspected.local(loss=loss), kind.request, kind.plan.schedule.num_units)
        factors = {name: getattr(loss, name) for name in traced.factors}
        return left(vary_like(factors, traced.factors)), _values_of(sums, traced, traced.sums)

    out_specs = meshes.value_specs((traced.factors, traced.sums))
    run = _sharded(kind, operands, body, operands.specs, out_specs)
    run.__name__ = "begin"
    return _lowered(kind, operands, run, operands.types, out_specs)


def lower_action(traced: Traced, operands: Operands, op: Op, stage: int) -> jax.stages.Lowered:
    """The program of an action.

    ``(sums, values, microbatch, weights, batch, factors)`` to ``(sums, values)``. Sums are those
    that it adds to, which are given away; values those that it reads, and those that it leaves.

    Args:
      traced: the model.
      operands: of the step.
      op: the action.
      stage: of the stage; others with the same code have the same program.
    """
    kind, meshes = traced.kind, operands.meshes
    types = traced.stages[stage]
    named = {name: getattr(types, name) for name in ("operand", "gradient", "stash", "crossing")}
    reads = {name: named[name] for name in reads_of(traced, op)}
    leaves = {
        name: types.gradient if name == "sent" else named[name]
        for name in leaves_of(traced, op, stage)
    }
    sums = {name: traced.sums[name] for name in sums_of(traced, op)}

    def body(
        of_sums: Any, values: Any, microbatch: Any, weights: Weights, batch: Batch, factors: Any
    ) -> Any:
        inspected = traced.on_rank(weights, batch, entered(factors))
        totals = make_sums(inspected.local(), kind.request, kind.plan.schedule.num_units)
        refs = totals.refs
        for name, arrays in of_sums.items():
            for ref, array in zip(refs[name], entered(arrays), strict=True):
                ref[...] = array
        stores = Arguments(entered(values))
        actions = make_actions(kind, inspected, totals, stage, stores, {op.kind})
        row = {"microbatch": vary(microbatch, actions.local.axes), **_PLACES}
        message = actions.run_op(op, row)
        results = {"sent": message, "gradient": message, "operand": message} | stores.written
        if op.kind == "F" and "gradient" in leaves:
            results["gradient"] = message
        results = {name: vary_like(results[name], t) for name, t in leaves.items()}
        return _values_of(totals, traced, sums), left(results)

    in_specs = *meshes.value_specs((sums, reads)), P(), *operands.specs[:2]
    in_specs = *in_specs, meshes.value_specs(traced.factors)
    out_specs = meshes.value_specs((sums, leaves))
    run = _sharded(kind, operands, body, in_specs, out_specs)
    run.__name__ = op.label
    number = meshes.types(jax.ShapeDtypeStruct((), jnp.int32), P())
    of_values = meshes.value_types((sums, reads))
    arguments = *of_values, number, *operands.types[:2], meshes.value_types(traced.factors)
    return _lowered(kind, operands, run, arguments, out_specs, donate_argnums=0)


def _lowered(
    kind: StepKind,
    operands: Operands,
    run: Callable[..., Any],
    types: Sequence[Any],
    out_specs: Any,
    **options: Any,
) -> jax.stages.Lowered:
    mesh = operands.meshes.abstract
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    platform = kind.plan.mesh.devices.flat[0].platform
    traced = jax.jit(run, out_shardings=shardings, **options).trace(*types)
    return traced.lower(lowering_platforms=(platform,))


def _values_of(sums: StepSums, traced: Traced, wanted: Mapping[str, Leaves]) -> dict[str, Leaves]:
    """The sums of these names, as they leave a program."""
    refs = sums.refs
    values = {name: [ref[...] for ref in refs[name]] for name in wanted}
    return left(vary_like(values, {name: traced.sums[name] for name in wanted}))


def reads_of(traced: Traced, op: Op) -> tuple[str, ...]:
    """The kinds of values that an action reads."""
    if op.kind == "W":
        return ("crossing",)
    operand = () if op.first else ("operand",)
    if op.kind == "F":
        return operand
    # The last stage's backward starts from its own output, if the stage's F has computed it.
    if traced.kind.plan.keep == "residuals":
        return "stash", "gradient"
    return operand if op.last else (*operand, "gradient")


def leaves_of(traced: Traced, op: Op, stage: int) -> tuple[str, ...]:
    """The kinds of values that an action leaves: ``sent`` is an output, ``operand`` the gradient
    for the stage's input.
    """
    keeps = traced.kind.request.training and traced.kind.plan.keep == "residuals"
    if op.kind == "F":
        sent = ("gradient",) * keeps if op.last else ("sent",)
        return (*sent, "stash") if keeps else sent
    if op.kind == "W":
        return ()
    sent = ("operand",) * traced.stages[stage].sends
    return (*sent, "crossing") if op.kind == "I" else sent


def sums_of(traced: Traced, op: Op) -> tuple[str, ...]:
    """The names of the sums that an action may add to."""
    kind, facts = traced.kind, traced.inspected.rank.facts
    training = kind.request.training
    names = {"added"} if facts.adds else set()
    if op.kind == "F":
        names = names if not training else set()
        names |= set(facts.stage_sums)
    else:
        names.add(f"chunk{op.chunk}")
    if op.kind in ("B", "I") if training else op.kind == "F":
        scalars = {"loss", "weight", "metrics"} & set(traced.sums)
        names |= {*scalars, "results", "ends"} if op.last else set()
        names |= {"ends", "inputs"} if op.first else set()
    return tuple(name for name in traced.sums if name in names)
