"""Memory of a layout on its fullest chip, by arithmetic: bytes by kind.

A forecast (`pipeline.insight.forecast`) traces one step, in seconds; a search looks at thousands of
layouts. A test compares the two on Llama 8B and 70B, part by part.

Letters as in `pipeline.planner.layout`. Weights, sums of gradients and Adam's two moments are
float32, all else bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pipeline.planner.layout import (
    BUT_ATTENTION,
    GATHERED,
    MLP,
    WEIGHT,
    HeldParameters,
    MeshLayout,
    PlannedJob,
    parameters_alone,
    parameters_of,
)
from pipeline.planner.makespan import carry_places, places, windows_of
from pipeline.planner.models import COMPUTE_BYTES
from pipeline.planner.sequences import (
    WIDE,
    carry_bytes,
    gathered_bytes,
    kept_bytes,
    score_bytes,
)

# Parts in which a head forms its logits where not all ranks share it: `loss_chunks=` of
# `pipeline.decoders.build`. A head that forms all at once holds so many times the bytes.
LOGIT_PARTS = 8
# What of a chip's memory a plan may take: docs/llama.md has compiled / predicted up to 1.01.
USABLE = 0.95
# What of its host's memory: the rest is for batches, checkpoints and the system.
USABLE_HOST = 0.9
# What autodiff alone leaves of a block for its backward, over the smallest set: 8B on v5p by its
# compiler (`8B-fsdp-kept`, docs/tpu.md).
UNTRIMMED = 2.25

# Places on a chip from which stashes are copied to the host, or to which they come back, beside
# those that stay (docs/offload.md, by the TPU compiler).
COPIES = 2


def usable(job: PlannedJob) -> float:
    """Bytes of a chip that a plan may take."""
    return USABLE * job.chip.hbm


def usable_host(job: PlannedJob) -> float:
    """Bytes of a chip's part of its host's memory that a plan may take."""
    return USABLE_HOST * job.chip.host_memory


def fits(job: PlannedJob, layout: MeshLayout) -> bool:
    """Tell whether a layout fits its chips, and their hosts."""
    return fullness(job, layout) <= 1


def fullness(job: PlannedJob, layout: MeshLayout) -> float:
    """The larger share of usable bytes that a layout takes, of a chip or of its host's memory."""
    held = alone_bytes if layout.schedule is None else pipeline_bytes
    on_chip = sum(held(job, layout).values()) / usable(job)
    return max(on_chip, host_bytes(job, layout) / usable_host(job))


def _block_bytes(job: PlannedJob, layout: MeshLayout) -> tuple[float, float, float]:
    """Bytes of a block and microbatch: its input, all residuals, and the workspace of an action."""
    tokens = layout.most_tokens(job.seq) / layout.tensor
    whole = COMPUTE_BYTES * layout.most_tokens(job.seq) * job.model.width
    residuals = job.model.plain_residuals(layout.experts) * tokens + _attended(job, layout)
    # Residuals and their gradients; under sequence parallelism also what was gathered.
    beside = 2 * residuals + (4 * whole if layout.tensor > 1 else 0.0) + _attending(job, layout)
    return whole / layout.tensor, residuals, beside


def _cut(job: PlannedJob, layout: MeshLayout) -> tuple[Any, ...]:
    return job.model, layout.cut, layout.rows, job.seq, layout.tensor


def _attended(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes that a block's attention by the formula keeps beside its own queries, keys and values.

    Beside what `kept_bytes` says those are keys and values gathered over `context`.
    """
    kept = kept_bytes(*_cut(job, layout))
    if layout.cut.way != "allgather":
        return kept
    R, N = layout.cut.ranks, layout.cut.slices
    return kept + (R - 1) / R * gathered_bytes(*_cut(job, layout)) / N


def _attending(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes of attention by the formula: scores, and float32 keys, values and their gradients."""
    wide = WIDE / COMPUTE_BYTES * gathered_bytes(*_cut(job, layout))
    return score_bytes(*_cut(job, layout)) + 2 * wide


def _carries(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes of what slices keep for later ones, keys and values of all blocks, and its gradients.

    Of either one more place than the timetable needs, into which goes what nobody reads.
    """
    if layout.cut.slices == 1:
        return 0.0
    n = -(-job.model.layers // (layout.stage * layout.chunks))
    sizes = layout.stage, layout.microbatches, layout.cut.slices
    values, gradients = carry_places(layout.schedule or "", *sizes)
    each = n * carry_bytes(*_cut(job, layout))
    return (values + 1 + (gradients + 1) * WIDE / COMPUTE_BYTES) * each


def _whole(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes per block and microbatch that a rank gathers over `tensor` in sequence parallelism.

    That is what enters attention and MLP, all of it on each rank; without such ranks nothing.
    """
    return job.model.ends_of_products * layout.most_tokens(job.seq) if layout.tensor > 1 else 0.0


def _left(job: PlannedJob, layout: MeshLayout, given: float, residuals: float) -> float:
    """Bytes per block and microbatch kept for the backward, unless a stage is recomputed.

    What attention gave has a float32 log sum of each head beside it.
    """
    tokens = layout.most_tokens(job.seq) / layout.tensor
    attention = (COMPUTE_BYTES * job.model.attended + 4 * job.model.heads) * tokens
    return {
        None: residuals + _whole(job, layout),
        GATHERED: residuals,
        "block": given,
        BUT_ATTENTION: given + attention,
        MLP: given + attention + job.model.projected * tokens,
    }[layout.remat]


def _crossing(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes per block and microbatch that I keeps for W.

    Under sequence parallelism a gradient that was gathered crosses whole, and an input where it is
    not gathered again.
    """
    tokens = layout.most_tokens(job.seq)
    gradients = job.model.ends_of_products * tokens
    inputs = gradients / layout.tensor if layout.remat == GATHERED else gradients
    return inputs + gradients + job.model.crossings(layout.experts) * tokens / layout.tensor


def _logits(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes of logits and their gradient, float32."""
    parts = layout.tensor * (layout.stage if layout.vocabulary == "stage" else LOGIT_PARTS)
    return 2 * 4 * layout.most_tokens(job.seq) * job.model.vocabulary / parts


def stash_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes that a forward of a stage leaves for its backward."""
    given, _, _ = _block_bytes(job, layout)
    if layout.remat == "stage":
        return given
    n = -(-job.model.layers // (layout.stage * layout.chunks))
    kept = job.model.residuals(layout.experts) * layout.most_tokens(job.seq) / layout.tensor
    kept += _attended(job, layout)
    return n * _left(job, layout, given, kept)


def pipeline_bytes(job: PlannedJob, layout: MeshLayout) -> dict[str, float]:
    """Bytes of a chip, as the kernel holds them; of stashes those that are not in host memory."""
    S, V, M = layout.stage, layout.chunks, layout.microbatches
    held_here = parameters_of(job, layout)
    parts = held_here.shards(layout.data, layout.experts.ranks)
    n = -(-job.model.layers // (S * V))
    given, residuals, beside = _block_bytes(job, layout)
    workspace = beside + (n * residuals if layout.remat == "stage" else 0.0)
    stashes, crossings = places(layout.schedule or "", S, V, M, layout.cut.slices)
    if layout.offload is not None:
        stashes += COPIES - math.floor(layout.offload * stashes + 1e-9)
    if crossings:
        workspace += n * _whole(job, layout)  # gradients that I gathered, before they have a place
    weights = WEIGHT * held_here.all
    held = {
        "weights": weights,
        "optimizer": moment_bytes(layout, held_here),
        "gradients": weights,
        "stashes": stashes * stash_bytes(job, layout) + crossings * n * _crossing(job, layout),
        # Float32 weights that all microbatches read are cast once, of blocks and not of tables.
        "weights cast": COMPUTE_BYTES * held_here.blocks,
        "messages": 2 * V * given,
        "workspace": max(workspace, _logits(job, layout)),
    }
    if layout.cut.slices > 1:
        held["keys of slices"] = _carries(job, layout)
    if layout.data_parallel == "fsdp":
        held["weights"] = WEIGHT * parts
        held["weights cast"] = (COMPUTE_BYTES + WEIGHT) * held_here.blocks / V  # of one action
    if layout.data_parallel == "windows":
        own = replace(held_here, ends=0).shards(layout.data, layout.experts.ranks)
        whole, summed, _, _ = windows_of(layout.schedule or "", S, V, M)
        chunk = held_here.blocks / V
        held["weights"] = WEIGHT * parts
        held["gradients"] = WEIGHT * (parts + held_here.ends + summed * chunk)
        held["weights cast"] = COMPUTE_BYTES * (own + held_here.ends + whole * chunk)
    if layout.host_optimizer:  # comes to the chip when the microbatches are through
        passing = sum(held.values()) - held["weights"] - held["gradients"] - held["optimizer"]
        held["optimizer"] = max(0.0, held["optimizer"] - passing)
    return held


def moment_bytes(layout: MeshLayout, held: HeldParameters) -> float:
    """Bytes of Adam's two moments on a rank of a pipeline."""
    if layout.data_parallel == "replicated":
        return 2 * WEIGHT * held.all
    return 2 * WEIGHT * held.shards(layout.data, layout.experts.ranks)


def left_alone(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes per block and microbatch kept for the backward, without a pipeline."""
    given, residuals, _ = _block_bytes(job, layout)
    return _left(job, layout, given, UNTRIMMED * residuals)


def alone_bytes(job: PlannedJob, layout: MeshLayout) -> dict[str, float]:
    """Bytes of a chip without a pipeline."""
    L, E = job.model.layers, layout.experts.ranks * layout.cut.ranks
    here = parameters_alone(job, layout)
    inside = layout.data // layout.data_slices
    shards = {"fsdp": layout.data, "hsdp": inside}.get(layout.data_parallel)
    size = WEIGHT * (here.all if shards is None else here.shards(shards, E))
    moments = here.shards(layout.data, E) if layout.data_parallel == "zero1" else size / WEIGHT
    _, _, beside = _block_bytes(job, layout)
    # Of two blocks, the next is gathered meanwhile, and one block's gradient; or all, cast.
    cast = 3 * COMPUTE_BYTES * here.blocks / L if shards else COMPUTE_BYTES * here.all
    return {
        "weights": size,
        "optimizer": 2 * WEIGHT * moments,
        "gradients": size,
        "stashes": (COPIES if layout.offload else L) * left_alone(job, layout),
        "weights cast": cast,
        "messages": 0.0,
        "workspace": max(beside, _logits(job, layout)),
    }


def host_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes of host memory for a chip: of stashes, and of the optimizer's state."""
    if layout.schedule is None:
        return job.model.layers * left_alone(job, layout) if layout.offload else 0.0
    held = moment_bytes(layout, parameters_of(job, layout)) if layout.host_optimizer else 0.0
    if layout.offload is None:
        return held
    most, _ = places(layout.schedule, layout.stage, layout.chunks, layout.microbatches)
    return held + math.floor(layout.offload * most + 1e-9) * stash_bytes(job, layout)
