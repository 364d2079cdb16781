"""Memory of a step that ends with the optimizer's update: prediction and lines.

Weights and optimizer state are donated: new values take the memory of the old values. The gradients
are then temporaries, and temporaries peak while microbatches run. The update needs less: its
arithmetic has no memory of its own. With ZeRO-1 each shard computes a part of the updates, and all
shards gather them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding

from collectives.compat import HOST_MEMORY
from collectives.places.sizes import is_size
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.checks import check_host
from pipeline.core.placement.meshes import entered
from pipeline.core.placement.placement import spread_of
from pipeline.insight.forecast.ahead import check_optimizer, lower_step
from pipeline.insight.forecast.bytes import MemoryPrediction, predict
from pipeline.insight.forecast.describe_memory import host_lines, text_of_temporaries
from pipeline.lint.placed import placed


@dataclass(frozen=True)
class StepPrediction:
    """Bytes of a step on each device.

    Attributes:
      gradients: the prediction for loss and gradients, which are used within the step.
      optimizer: bytes of arguments: the optimizer's state on the device.
      update: bytes of the update: gradients, the updates that are gathered over ``data``, and the
        state that is copied from host memory. A compiler with enough memory copies all of it at
        once.
      host_optimizer: the state in host memory, which counts in no sum of device bytes.
    """

    gradients: MemoryPrediction
    optimizer: int
    update: int
    host_optimizer: int = 0

    @property
    def arguments(self) -> int:
        """Bytes of a step's arguments."""
        return self.gradients.arguments + self.optimizer

    @property
    def temporaries(self) -> int:
        """The bytes in addition to arguments: the larger of microbatches and update."""
        return max(self.gradients.temporaries, self.update)

    @property
    def total(self) -> int:
        """The total bytes; results reuse the memory of arguments."""
        return self.arguments + self.temporaries


def predict_step(
    pipe: Any, optimizer: Any, model: Model, weights: Weights, batch: Batch
) -> StepPrediction:
    """Predict the bytes of a step with its update.

    Args:
      pipe: the pipeline.
      optimizer: the pipeline's `nnx.Optimizer`; its state may be types.
      model: the kernel's `Model` of the pipeline.
      weights: the kernel's `Weights`, arrays or types.
      batch: the kernel's `Batch`, with leaves [N, ...].
    """
    mesh, update = pipe.mesh, 0
    for _, variable in nnx.to_flat_state(nnx.state(pipe, pipe.wrt)):
        spread = spread_of(variable, ())
        value = variable.get_raw_value()
        parts = {
            spec: math.prod(NamedSharding(mesh, spec).shard_shape(value.shape))
            for spec in (spread.stored, spread.gradient)
        }
        update += sum(parts.values()) * value.dtype.itemsize
    with entered(pipe.plan.mesh, pipe.plan.home):
        gradients = predict(pipe.plan, model, weights, batch, used=True)
    state = nnx.state(optimizer)
    whole, hosted = (
        sum(one.device_bytes for one in placed(part, mesh)) for part in (state, _on_host(state))
    )
    return StepPrediction(gradients, whole - hosted, update + hosted, host_optimizer=hosted)


def share_within(
    pipe: Any, budget: Any, optimizer: Any, operands: tuple[Model, Weights, Batch]
) -> float | None:
    """Find the smallest share of stashes in host memory so that a step fits; None if 0 is enough.

    Args:
      pipe: the pipeline; its own ``offload`` is not read.
      budget: bytes of each device.
      optimizer: the pipeline's `nnx.Optimizer`, for a step with the update; or None.
      operands: the kernel's `Model`, `Weights` and `Batch` of the pipeline.

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
    held = _held(pipe, optimizer, operands)
    whole = held(None)
    total, stashes = whole.total, _gradients(whole).stashes
    if total <= budget:
        return None
    check_host(1.0, pipe.mesh, pipe.schedule)
    moved = 0
    while total > budget and moved < stashes.count:
        moved += max(1, min(-(-(total - budget) // stashes.each), stashes.count - moved))
        total = held(moved / stashes.count).total
    if total > budget:
        raise ValueError(
            f"offload_within(budget={budget:,}): with all stashes in host memory that outlive the "
            f"next action, a step is predicted to take {total:,} bytes on each device (without, "
            f"{whole.total:,}); give a budget of at least that, or keep less: remat='stage', more "
            f"ranks, smaller microbatches, or make_optimizer(offload=True)"
        )
    return moved / stashes.count


def _held(
    pipe: Any, optimizer: Any, operands: tuple[Model, Weights, Batch]
) -> Callable[[float | None], MemoryPrediction | StepPrediction]:
    """Make a function that predicts a step with a share of its stashes in host memory."""
    step = None if optimizer is None else predict_step(pipe, optimizer, *operands)

    def predicted(share: float | None) -> MemoryPrediction | StepPrediction:
        plan = pipe.plan.anew(offload=share)
        compiled = plan.programs.make()  # dropped at the end of this call
        with entered(plan.mesh, plan.home):
            found = predict(plan, *operands, used=step is not None)
        del compiled
        return found if step is None else dataclasses.replace(step, gradients=found)

    return predicted


def _gradients(found: MemoryPrediction | StepPrediction) -> MemoryPrediction:
    return found.gradients if isinstance(found, StepPrediction) else found


def _on_host(state: Any) -> Any:
    """Return the part of a state in host memory."""

    def is_hosted(_: Any, variable: Any) -> bool:
        sharding = getattr(variable.get_raw_value(), "sharding", None)
        return getattr(sharding, "memory_kind", None) == HOST_MEMORY

    return nnx.filter_state(state, is_hosted)


def describe_step(
    pipe: Any, optimizer: Any, operands: tuple[Model, Weights, Batch] | None, *, compiled: bool
) -> list[str]:
    """Describe in lines the bytes of a step with its update.

    Args:
      pipe: the pipeline.
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
    model, weights, batch = operands
    found = predict_step(pipe, optimizer, model, weights, batch)
    if not compiled:
        return step_lines(found)
    lowered = lower_step(pipe, optimizer, batch.inputs, batch.targets, batch.extras)
    return step_lines(found, lowered.compile().memory_analysis())


def step_lines(step: StepPrediction, compiled: Any = None) -> list[str]:
    """Write each rank's predicted memory, and the compiler's figures if there are any.

    Args:
      step: the prediction.
      compiled: `jax.stages.Compiled.memory_analysis()` of the same step, or None.
    """
    found, said = step.gradients, [""] * 3
    if compiled is not None:
        arguments, temporaries = compiled.argument_size_in_bytes, compiled.temp_size_in_bytes
        beside = compiled.output_size_in_bytes - compiled.alias_size_in_bytes
        total = arguments + beside + temporaries
        said = [f"; compiled {size:,}" for size in (total, arguments, temporaries)]
    text = text_of_temporaries(found)
    if step.update > found.temporaries:
        text = f"gradients and updates {step.update:,}"
        if step.host_optimizer:
            text = f"gradients, updates and state from host memory {step.update:,}"
    arguments = f"weights {found.weights:,}, optimizer {step.optimizer:,}, batch {found.batch:,}"
    return [
        f"bytes per rank of gradients and update, predicted: {step.total:,}{said[0]}",
        f"  arguments {step.arguments:,}: {arguments}{said[1]}",
        "  results lie where weights and optimizer did",
        f"  temporaries {step.temporaries:,}: {text}{said[2]}",
        *host_lines(found, step.host_optimizer),
    ]
