"""The arguments of the kernel for one step, from a pipeline's modules and the user's batch.

Letters: N rows of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from pipeline.base.axes import Axes
from pipeline.base.tree import Tree, is_abstract
from pipeline.core.model.chunks import lay_out
from pipeline.core.model.ends import find_tables
from pipeline.core.model.loss import LossModule
from pipeline.core.model.microbatch import make_batch, place
from pipeline.core.model.model import Batch, Declared, Model, Weights
from pipeline.core.model.stage import Ends, define, stage_positions
from pipeline.core.model.trained_filters import trained_by
from pipeline.core.model.trained_state import find_state
from pipeline.core.options.plan import Plan
from pipeline.core.placement.meshes import untyped

Operands = tuple[Model, Weights, Batch]
_ENDS = "embed or head", "embed, head or loss_fn"


def make_operands(
    plan: Plan,
    chunks: Sequence[nnx.Module],
    ends: Ends,
    inputs: Tree,
    targets: Tree,
    extras: Any,
    loss_for: str = "",
    *,
    wrt: Any = nnx.Param,
    has_aux: bool | None = False,
    weighed: bool = False,
    num_microbatches: int | None = None,
    axes: Axes | None = None,
) -> Operands:
    """Make the static half of the model, its state, and the batch on the mesh.

    Args:
      chunks: [V] modules.
      inputs: [N, ...] leaves.
      targets: [N, ...] leaves.
      extras: None, or a dict of trees with leaves [N, ...].
      loss_for: the name of the method that needs a loss, "" if none is needed.
      num_microbatches: M if the run does not use the schedule and its M; else None.
      axes: the roles of mesh axes; by default the roles in the plan.

    Raises:
      ValueError: a loss is needed and the pipeline has none, or the batch does not fit.
    """
    if loss_for and plan.loss_fn is None:
        raise ValueError(
            f"{loss_for}() needs a loss, and this pipeline was made with loss_fn=None; give "
            f"Pipeline(..., loss_fn=f) with f(outputs, targets) of one microbatch"
        )
    # A run with its own M does not use the schedule, and works on whole sequences.
    M = num_microbatches or plan.schedule.num_microbatches
    cut: dict[str, Any] = {"num_slices": plan.schedule.num_slices, "lengths": plan.lengths}
    cut = {} if num_microbatches else cut
    batch = make_batch(inputs, targets, extras, num_microbatches=M, axes=axes or plan.axes, **cut)
    if plan.stage_meshes is None:  # with stage_meshes each rank takes the leaves that it reads
        batch = place(untyped(batch, plan.mesh), plan.mesh)
    model, weights = _model_and_weights(plan, chunks, ends, wrt)
    return dataclasses.replace(model, has_aux=has_aux, weighed=weighed), weights, batch


def _model_and_weights(
    plan: Plan, chunks: Sequence[nnx.Module], ends: Ends, wrt: Any
) -> tuple[Model, Weights]:
    # Modules are split in every call, since their arrays may have changed. The trained parameters
    # and the declared state are cached by the structure of the modules' state.
    stages_of = plan.stages_of
    definitions, params, rests = zip(*(define(chunk, "a stage") for chunk in chunks), strict=True)
    definition, ends_params, ends_rest = define(ends, _ENDS[isinstance(plan.loss_fn, LossModule)])
    structure = jax.tree.structure([*params, ends_params])
    declared = _declared(plan, chunks, ends, (structure, jax.tree.structure([*rests, ends_rest])))
    definition = dataclasses.replace(definition, state=declared.ends)
    model = Model(
        stages=stage_positions(chunks, definitions, stages_of, declared.stages),
        ends=definition,
        has_embed=ends.embed is not None,
        has_head=ends.head is not None,
        loss_fn=plan.loss_fn,
        layout=lay_out(chunks, ends),
        trained=trained_by(wrt, chunks, ends, stages_of, plan.compiled.trained, structure)[0],
        policy=plan.remat if callable(plan.remat) else None,
        gathers_again=plan.remat == "gathered",
        compute_dtype=plan.compute_dtype,
        grad_dtype=plan.grad_dtype,
        tables=find_tables(ends_params, ends, plan.shared),
        declared=declared,
        stack=plan.stack,
    )
    return model, Weights(params, ends_params, rests, ends_rest)


def _declared(plan: Plan, chunks: Sequence[nnx.Module], ends: Ends, structure: Any) -> Declared:
    cache = plan.compiled.states
    if structure not in cache:
        cache[structure] = find_state(plan.state, chunks, ends, plan.stages_of)
    declared: Declared = cache[structure]
    return declared


def check_arrays(method: str, operands: Operands) -> Operands:
    """Return the operands; raise ValueError if leaves are types."""
    if is_abstract(operands[1:]):
        raise ValueError(
            f"{method}() computes, but the pipeline or the batch is made of types "
            f"(jax.ShapeDtypeStruct); make the stages without nnx.eval_shape, or ask for "
            f"pipe.describe(inputs, targets) or pipe.lower(inputs, targets), which run nothing"
        )
    return operands


def device_limit(plan: Plan) -> int | None:
    """Return the bytes that each device may hold; None if option and runtime set no limit."""
    if plan.memory_limit is not None:
        return plan.memory_limit
    # Devices of other processes do not report their memory.
    mine = [d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]
    limits = [limit for limit in map(reported_limit, mine) if limit is not None]
    return min(limits, default=None)


def reported_limit(device: jax.Device) -> int | None:
    try:
        stats = device.memory_stats() or {}
    except (NotImplementedError, RuntimeError):  # a device of a topology without hardware
        return None
    return stats.get("bytes_limit")


def types(tree: Tree) -> Tree:
    """Return the types of a tree's arrays, with their shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        tree,
    )
