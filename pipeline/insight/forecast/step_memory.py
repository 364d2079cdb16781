"""Memory of a step that ends with the optimizer's update, and the offload that fits a budget.

Weights and optimizer state are donated: new values take the memory of the old values. The gradients
are then no results, but sums that the step holds until its update.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from flax import nnx

from collectives.compat import HOST_MEMORY
from collectives.places.sizes import is_size
from pipeline.base.tree import Tree
from pipeline.base.warn import ModelWarning
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.checks import check_host
from pipeline.core.placement.meshes import entered
from pipeline.core.step.operands import Operands
from pipeline.insight.forecast.ahead import check_optimizer, lower_step
from pipeline.insight.forecast.bytes import PlaceBytes, StepBytes, predict
from pipeline.insight.forecast.describe_memory import compiled_bytes, memory_lines
from pipeline.lint.placed import placed


def predict_step(
    pipe: Any, optimizer: Any, model: Model, weights: Weights, batch: Batch
) -> StepBytes:
    """Count the bytes of a step with its update.

    Args:
      optimizer: the pipeline's `nnx.Optimizer`; its state may be types.
      weights: the kernel's `Weights`, arrays or types.
      batch: the kernel's `Batch`, with leaves [N, ...].
    """
    with entered(pipe.plan.mesh, pipe.plan.home):
        gradients = predict(pipe.plan, model, weights, batch, used=True)
    state = nnx.state(optimizer)
    whole, hosted = (
        sum(one.device_bytes for one in placed(part, pipe.mesh))
        for part in (state, _on_host(state))
    )
    return dataclasses.replace(
        gradients, has_update=True, optimizer=whole - hosted, host_optimizer=hosted
    )


def _on_host(state: Any) -> Any:
    def is_hosted(_: Any, variable: Any) -> bool:
        sharding = getattr(variable.get_raw_value(), "sharding", None)
        return getattr(sharding, "memory_kind", None) == HOST_MEMORY

    return nnx.filter_state(state, is_hosted)


def describe_step(
    pipe: Any, optimizer: Any, operands: tuple[Model, Weights, Batch] | None, *, compiled: bool
) -> list[str]:
    """Describe in lines the bytes of a step with its update.

    Args:
      optimizer: the pipeline's `nnx.Optimizer`, of arrays or types.
      operands: model, weights and batch of a step; None for the operands of the last step.
      compiled: whether to compile the step and add the bytes that the compiler reports.

    Raises:
      ValueError: no batch is known; or the optimizer is not this pipeline's.
    """
    check_optimizer(pipe, optimizer)
    operands = operands or pipe.plan.facts.last
    if operands is None:
        raise ValueError(
            "describe(optimizer=...) predicts a step, and no batch is known; give it one, "
            "describe(inputs, targets, optimizer=...), of arrays or jax.ShapeDtypeStruct"
        )
    found, batch = predict_step(pipe, optimizer, *operands), operands[2]
    if not compiled:
        return memory_lines(found)
    lowered = lower_step(pipe, optimizer, batch.inputs, batch.targets, batch.extras)
    return memory_lines(found, lowered.compile())


def share_within(
    pipe: Any, budget: Any, optimizer: Any, batch: tuple[Tree, ...], operands: Operands
) -> float | None:
    """Find the smallest share of stashes in host memory so that a step fits; None if 0 is enough.

    The step is compiled for each share that is tried. Each try moves as many more stashes as have
    the bytes that are missing, so few tries are needed.

    Args:
      pipe: the pipeline; its own ``offload`` is not read.
      budget: bytes that the step may take on each device.
      optimizer: the pipeline's `nnx.Optimizer`, for a step with the update; or None.
      operands: model, weights and the batch.

    Raises:
      ValueError: the budget is no number of bytes or is too small even with all stashes in host
        memory, or the pipeline can keep no stashes in host memory.
    """
    if not is_size(budget):
        raise ValueError(
            f"offload_within(budget={budget!r}): must be a number of bytes, at least 1"
        )
    if optimizer is not None:
        check_optimizer(pipe, optimizer)
    whole, stashes = _compiled(pipe, None, optimizer, batch, operands)
    if whole <= budget:
        return None
    check_host(1.0, pipe.mesh, pipe.schedule)
    moved, total = 0, whole
    while total > budget and moved < stashes.count:
        moved += max(1, min(-(-(total - budget) // stashes.each), stashes.count - moved))
        total, _ = _compiled(pipe, moved / stashes.count, optimizer, batch, operands)
    if total > budget:
        raise ValueError(
            f"offload_within(budget={budget:,}): with all stashes in host memory that outlive the "
            f"next action, a compiled step takes {total:,} bytes on each device (without, "
            f"{whole:,}); give a budget of at least that, or keep less: remat='stage', more "
            f"ranks, smaller microbatches, or make_optimizer(offload=True)"
        )
    return moved / stashes.count


def _compiled(
    pipe: Any, share: float | None, optimizer: Any, batch: tuple[Tree, ...], operands: Operands
) -> tuple[int, PlaceBytes]:
    """Compile a step with a share of its stashes in host memory: bytes on a device, and stashes."""
    inputs, targets, extras = batch
    with warnings.catch_warnings():  # a step that is tried and does not fit is no mistake
        warnings.simplefilter("ignore", ModelWarning)
        trial = pipe.replace(offload=share)
        if trial.plan.engine == "programs":
            from pipeline.insight.forecast.by_rank import compiled_step

            with entered(trial.plan.mesh, trial.plan.home, programs=True):
                return compiled_step(trial.plan, operands, optimizer)
        step = trial.lower(inputs, targets, extras=extras, optimizer=optimizer).compile()
    model, weights, rows = trial.plan.facts.last
    with entered(trial.plan.mesh, trial.plan.home):
        found = predict(trial.plan, model, weights, rows, used=optimizer is not None)
    # Where both memories are one (CPU), the compiler counts the host's part as temporaries.
    sizes: Any = step.memory_analysis()
    on_host = max(0, found.host - sizes.host_temp_size_in_bytes)
    return compiled_bytes(step) - on_host, found.stashes
