"""The parts of a step's time: measured parts, and the prediction of the schedule's clock.

Measured are a step's seconds, from the end of the one before, the wait for its batch, and memory.
How the rest falls into compute, bubble and communication is the prediction of the clock that the
pipeline was lowered for, at the costs that it knows: `Pipeline(costs=)`, or F = I = W and messages
that take no time.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.chips import CHIPS
from pipeline.pipeline import Pipeline
from pipeline.training.batches import Batch
from schedules import simulate

# What a runtime calls a chip of the planner's table, in the order in which it is looked for.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "H100": "h100",
    "A100": "a100",
}


class Shares(NamedTuple):
    """Predicted shares of a step on all ranks; their sum is 1.

    Attributes:
      compute: in which ranks work.
      bubble: in which they wait for work of others.
      communication: in which they wait for messages that are under way.
    """

    compute: float
    bubble: float
    communication: float


def predicted(model: Any) -> Shares:
    """The shares of a pipeline's step by its own clock; of any other model all is compute."""
    if not isinstance(model, Pipeline):
        return Shares(1.0, 0.0, 0.0)
    report = simulate(model.schedule, **model.plan.clock)
    whole = report.makespan * len(report.work)
    sent = sum(part["communication"] for part in report.explain().parts) / whole
    compute = min(1.0, sum(report.work) / whole)
    return Shares(compute, max(0.0, 1.0 - compute - sent), sent)


def tokens_of(batch: Batch) -> int:
    """Numbers of an integer input [N, t]; of any other its rows."""
    leaves = jax.tree.leaves(batch.inputs)
    shape = np.shape(leaves[0]) if leaves else ()
    is_words = len(shape) > 1 and jnp.issubdtype(leaves[0].dtype, jnp.integer)
    return math.prod(shape) if is_words else batch.rows


def flops_per_token(model: Any) -> float:
    """6 operations for each number of each matrix: products of a forward and a backward pass.

    Matrices are the parameters with two axes or more in the model without a pipeline; those of a
    pipeline's embed are looked up and do not count. Scores of attention are left out, and so is
    what is computed again.
    """
    weights = nnx.state(model, nnx.Param)
    layers: Any = weights
    if isinstance(model, Pipeline):
        layers = jax.eval_shape(model.to_layers, weights)
        layers = {name: part for name, part in layers.items() if name != "embed"}
    return 6.0 * sum(x.size for x in jax.tree.leaves(layers) if x.ndim > 1)


def peak_flops(device: jax.Device) -> float | None:
    """bfloat16 operations a second at a device's peak; None of what is not in the table."""
    name = next((chip for kind, chip in KINDS.items() if kind in device.device_kind), None)
    return None if name is None else CHIPS[name].flops


def memory() -> int | None:
    """Bytes: the most that a device of this process holds, or else what the process holds.

    None where neither is known.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [one["bytes_in_use"] for one in stats if "bytes_in_use" in one]
    return max(used) if used else resident()


def resident() -> int | None:
    """Bytes of this process in main memory; None where the system does not say."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    found = [line.split() for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(found[0][1]) if found else None
