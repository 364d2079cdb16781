"""Memory of a layout on its fullest chip, by arithmetic: bytes by kind.

A forecast (`pipeline.insight.forecast`) reads these bytes off one traced step, which takes seconds;
a search looks at thousands of layouts. Tests compare the two, part by part.

`pipeline.planner.layout` lists the letters. Weights, sums of gradients and Adam's two moments are
float32, everything else is bfloat16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pipeline.planner.clock import places, windows_of
from pipeline.planner.layout import (
    BUT_ATTENTION,
    COMPUTE_BYTES,
    GATHERED,
    MLP,
    WEIGHT,
    Dispatched,
    MeshLayout,
    Parameters,
    PlannedJob,
    parameters_of,
)
from pipeline.planner.models import ModelSizes

WIDE = 4 / COMPUTE_BYTES  # float32 over bfloat16
# Parts in which a head forms its logits if not all ranks share it: `loss_chunks=` of
# `pipeline.decoders.build`. A head that forms all logits at once holds so many times the bytes.
LOGIT_PARTS = 8
# Shares of a chip's memory (bench/notes/llama.md has compiled / predicted up to 1.01) and of its
# host's that a plan may take: the rest of the host's is for batches, checkpoints and the system.
USABLE, USABLE_HOST = 0.95, 0.9
# Bytes that autodiff alone keeps of a block for its backward, over the bytes that the backward
# reads: the compiler's bytes of 8B under FSDP on v5p (bench/notes/plans.md).
UNTRIMMED = 2.25
# Buffers on a chip for stashes that are copied to or from the host, by the TPU compiler
# (bench/notes/offload.md).
COPIES = 2


def usable(job: PlannedJob) -> float:
    """Return the bytes of a chip that a plan may take."""
    return USABLE * job.chip.hbm


def usable_host(job: PlannedJob) -> float:
    """Return the bytes of a chip's part of its host's memory that a plan may take."""
    return USABLE_HOST * job.chip.host_memory


def fullness(job: PlannedJob, layout: MeshLayout) -> float:
    """Return the share of usable bytes that a layout takes: of chip or host, the larger one."""
    on_chip = sum(bytes_of(job, layout).values()) / usable(job)
    return max(on_chip, host_bytes(job, layout) / usable_host(job))


class Columns(NamedTuple):
    """Columns per token in one block (bench/notes/kernel.md).

    Attributes:
      kept: columns that a stage keeps for the backward, the smallest set: the block's input and the
        sum in its middle; queries and attention's result; keys and values; gate and up. Norms and
        the gate's product are recomputed. With experts: every row, its gate and up, and the
        experts' outputs, which the gradient of the router's weights reads.
      read: columns that the backward reads, and so the forward writes: also norms' results and the
        gate's product, and with experts the tokens that come from other ranks.
      crossing: columns from I to W: inputs of products and gradients of their outputs, except the
        inputs and outputs of attention and MLP.
    """

    kept: float
    read: float
    crossing: float


def columns_of(model: ModelSizes, at: Dispatched) -> Columns:
    """Count the columns of a block."""
    attention, experts = model.projected + model.attended, model.experts
    gates, rows, outputs, arrived = float(model.hidden), 0.0, 0.0, 0.0
    if experts is not None:
        rows, outputs, arrived = at.rows(experts)
        gates = rows * experts.hidden + experts.shared
    moved = model.width * (rows + outputs)
    return Columns(
        kept=2 * model.width + attention + 2 * gates + moved,
        read=4 * model.width + attention + 3 * gates + moved + model.width * arrived,
        crossing=attention + model.latents + 3 * gates + 2 * rows * model.width,
    )


# --- a block or a stage, in one action


def _layers(job: PlannedJob, layout: MeshLayout) -> int:
    return -(-job.model.layers // (layout.stage * layout.chunks))


def _bytes(job: PlannedJob, layout: MeshLayout, columns: float) -> float:
    """Return the bytes of ``columns`` numbers a token, on a rank."""
    return COMPUTE_BYTES * columns * layout.tokens(job.seq)


def _ends(job: PlannedJob, layout: MeshLayout) -> float:
    """Count the bytes of attention's and MLP's inputs, which every tensor rank has whole."""
    return _bytes(job, layout, 2 * job.model.width * layout.tensor)


def left_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Return the bytes that one block's forward leaves for its backward, without stage remat.

    Attention's result comes with a float32 log sum of each head.
    """
    model = job.model
    attention = model.attended + WIDE * model.heads
    least = {
        "block": model.width,
        BUT_ATTENTION: model.width + attention,
        MLP: model.width + attention + model.projected,
    }.get(layout.remat or "")
    if least is not None:
        return _bytes(job, layout, least)
    columns = columns_of(model, layout.experts)
    gathered = 0.0 if layout.tensor == 1 or layout.remat == GATHERED else _ends(job, layout)
    if layout.schedule is None:
        return UNTRIMMED * _bytes(job, layout, columns.read) + gathered
    return _bytes(job, layout, columns.kept) + gathered


def stash_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Return the bytes that a stage's forward leaves for its backward."""
    if layout.remat == "stage":
        return _bytes(job, layout, job.model.width)
    return _layers(job, layout) * left_bytes(job, layout)


def crossing_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Return the bytes that I leaves for W in a stage.

    Under sequence parallelism a gathered gradient crosses whole. So does an input, unless it is
    gathered again.
    """
    ends = _ends(job, layout)
    inputs = ends / layout.tensor if layout.remat == GATHERED else ends
    others = _bytes(job, layout, columns_of(job.model, layout.experts).crossing)
    return _layers(job, layout) * (inputs + ends + others)


def _workspace(job: PlannedJob, layout: MeshLayout, *, crosses: bool = False) -> float:
    """Count the bytes of an action: a block's residuals, their gradients, and gathered inputs.

    A stage that is recomputed holds the residuals of all its blocks. I holds the gradients that it
    gathered for W until I ends. A head holds float32 logits and their gradient.
    """
    residuals = _bytes(job, layout, columns_of(job.model, layout.experts).read)
    found = (2 + _layers(job, layout) * (layout.remat == "stage")) * residuals
    if layout.tensor > 1:
        found += (2 + _layers(job, layout) * crosses) * _ends(job, layout)
    parts = layout.stage if layout.shares_words else LOGIT_PARTS
    return max(found, 2 * WIDE * _bytes(job, layout, job.model.vocabulary) / parts)


# --- a chip


def moment_bytes(layout: MeshLayout, held: Parameters) -> float:
    """Return the bytes of Adam's two moments on a rank."""
    context = layout.context if layout.schedule is None else 1
    data = layout.data // (layout.data_slices if layout.data_parallel == "hsdp" else 1)
    shard = held.shard(data, layout.experts.ranks * context)
    return 2 * WEIGHT * (sum(held) if layout.data_parallel == "replicated" else shard)


def bytes_of(job: PlannedJob, layout: MeshLayout) -> dict[str, float]:
    """Count the bytes of a chip by kind, without stashes in host memory."""
    held = parameters_of(job.model, layout)
    moments = moment_bytes(layout, held)
    whole = WEIGHT * sum(held)
    found = {"weights": whole, "optimizer": moments, "gradients": whole}
    if layout.schedule is None:
        kept = COPIES if layout.offload else job.model.layers
        found["stashes"] = kept * left_bytes(job, layout)
        found["workspace"] = _workspace(job, layout)
        found["weights cast"] = COMPUTE_BYTES * sum(held)
        if layout.data_parallel in ("fsdp", "hsdp"):
            found["weights"] = found["gradients"] = moments / 2
            # Two blocks' weights, because the next is gathered meanwhile, and one block's gradient.
            found["weights cast"] = 3 * COMPUTE_BYTES * held.blocks / job.model.layers
        return found
    stashes, crossings = places(layout.order)
    if layout.offload is not None:
        stashes += COPIES - math.floor(layout.offload * stashes + 1e-9)
    found["stashes"] = stashes * stash_bytes(job, layout) + crossings * crossing_bytes(job, layout)
    found["messages"] = 2 * layout.chunks * _bytes(job, layout, job.model.width)
    found["workspace"] = _workspace(job, layout, crosses=crossings > 0)
    # Float32 weights of blocks are cast once for all microbatches; tables are not cast.
    found["weights cast"] = COMPUTE_BYTES * held.blocks
    chunk = held.blocks / layout.chunks
    if layout.data_parallel == "windows":
        found["weights"] = moments / 2
        blocks = held._replace(ends=0).shard(layout.data, layout.experts.ranks)
        here, summed, _, _ = windows_of(layout.order)
        found["gradients"] = moments / 2 + WEIGHT * (held.ends + summed * chunk)
        found["weights cast"] = COMPUTE_BYTES * (blocks + held.ends + here * chunk)
    if layout.host_optimizer:  # copied to the chip after the last microbatch
        passing = sum(found.values()) - found["weights"] - found["gradients"] - moments
        found["optimizer"] = max(0.0, moments - passing)
    return found


def host_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Return the bytes of host memory for a chip: stashes, and the optimizer's state."""
    if layout.schedule is None:
        return job.model.layers * left_bytes(job, layout) if layout.offload else 0.0
    held = parameters_of(job.model, layout)
    found = moment_bytes(layout, held) if layout.host_optimizer else 0.0
    if layout.offload is not None:
        most, _ = places(layout.order)
        found += math.floor(layout.offload * most + 1e-9) * stash_bytes(job, layout)
    return found
