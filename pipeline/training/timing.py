"""The parts of a step's time: measured parts, and the prediction of the schedule's clock.

Measured are a step's seconds (from the end of the previous step), the wait for its batch, and
memory. The division into compute, bubble and communication is predicted by the clock that the
pipeline was lowered for. The costs are those of `Pipeline(costs=)`, or F = I = W and messages that
take no time.
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

# A runtime's names of chips in the planner's table, in the order of the search.
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
      compute: the share in which ranks work.
      bubble: the share in which ranks wait for work of other ranks.
      communication: the share in which ranks wait for messages.
    """

    compute: float
    bubble: float
    communication: float


def predicted(model: Any) -> Shares:
    """Predict the shares of a pipeline's step by its clock; other models have only compute."""
    if not isinstance(model, Pipeline):
        return Shares(1.0, 0.0, 0.0)
    report = simulate(model.schedule, **model.plan.clock)
    whole = report.makespan * len(report.work)
    sent = sum(part["communication"] for part in report.explain().parts) / whole
    compute = min(1.0, sum(report.work) / whole)
    return Shares(compute, max(0.0, 1.0 - compute - sent), sent)


def tokens_of(batch: Batch) -> int:
    """Count the tokens of an integer input [N, t], or the rows of any other input."""
    leaves = jax.tree.leaves(batch.inputs)
    shape = np.shape(leaves[0]) if leaves else ()
    is_words = len(shape) > 1 and jnp.issubdtype(leaves[0].dtype, jnp.integer)
    return math.prod(shape) if is_words else batch.rows


def flops_per_token(model: Any) -> float:
    """Count 6 operations for each number of each matrix: products of forward and backward.

    Matrices are the parameters with two axes or more in the model without a pipeline; a pipeline's
    embed is a lookup and does not count. Attention scores and recomputation do not count.
    """
    weights = nnx.state(model, nnx.Param)
    layers: Any = weights
    if isinstance(model, Pipeline):
        layers = jax.eval_shape(model.to_layers, weights)
        layers = {name: part for name, part in layers.items() if name != "embed"}
    return 6.0 * sum(x.size for x in jax.tree.leaves(layers) if x.ndim > 1)


def peak_flops(device: jax.Device) -> float | None:
    """Return a device's peak bfloat16 operations a second; None for a device not in the table."""
    name = next((chip for kind, chip in KINDS.items() if kind in device.device_kind), None)
    return None if name is None else CHIPS[name].flops


def memory() -> int | None:
    """Return the most bytes that a device of this process holds, or else the process's bytes.

    The result is None if neither is known.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [one["bytes_in_use"] for one in stats if "bytes_in_use" in one]
    return max(used) if used else resident()


def resident() -> int | None:
    """Return the bytes of this process in main memory; None if the system does not report them."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    found = [line.split() for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(found[0][1]) if found else None
