"""Seconds of a layout's step, by a roofline: products, passes through HBM, bytes over links.

`pipeline.planner.layout` lists the letters. Bytes of collectives, for sequence parallelism, are in
bench/notes/communication.md. Latency is not counted. Work hides none of a pipeline's collectives,
and as many collectives of FSDP alone as possible. So a pipeline must beat FSDP at its best.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.planner.clock import makespan, windows_of
from pipeline.planner.layout import (
    BUT_ATTENTION,
    COMPUTE_BYTES,
    CONTEXT,
    GATHERED,
    MLP,
    WEIGHT,
    MeshLayout,
    PlannedJob,
    layers_of_stages,
    parameters_of,
)
from pipeline.planner.memory import bytes_of, columns_of, left_bytes, moment_bytes, stash_bytes
from pipeline.planner.models import ModelSizes
from schedules import Costs
from schedules.clocks.hosted import Keep
from schedules.core.costs import is_last_forward_free

# The mean error of predicted steps against 21 published ones: 13 by MaxText on v5p and v6e, 8 by
# Megatron on A100 (`python -m bench.recipes.table`, and a test). Plans that differ less are equal.
ERROR = 0.10
# Passes through HBM in F over the values that a block's backward reads: for norms, rotary
# positions, SwiGLU and layouts. B has twice as many passes, for values and gradients. The head has
# as many over float32 logits. Fitted with `Chip.efficiency` to those 21 steps.
PASSES = 6.0
# Attention kernels' share of peak, and their products of scores or values in F and B: splash
# attention has two kernels in its backward, and each forms the scores and their gradients again.
# Shares from .4 to .6 give the same error.
ATTENTION_EFFICIENCY, ATTENTION_PRODUCTS = 0.5, (2, 7)
# Time of I and W together, over B: cycles of the v5e compiler (bench/notes/schedules.md).
SPLIT = 1.10
# Without a pipeline, the part of a block's backward that hides a copy from host memory; assumed for
# MaxText's steps above. In a pipeline `Chip.host_overlap` is used.
NEXT_BLOCK = 1 / 3


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of a layout's step.

    Attributes:
      seconds: seconds of a step by cause: compute, recompute, bubble, host, tensor, expert,
        context, data, update.
      bytes: bytes on the fullest chip, by kind.
    """

    layout: MeshLayout
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    bound: bool = False

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def hbm(self) -> float:
        return sum(self.bytes.values())


def mfu(job: PlannedJob, step: float) -> float:
    """Compute the model's operations over the chips' peak in a step; only chosen experts count."""
    tokens = job.batch * job.seq
    return tokens * job.model.step_operations(job.seq) / (job.devices * job.chip.flops * step)


# --- one block


class Repeated(NamedTuple):
    """Shares of a forward that a backward computes and sends a second time."""

    compute: float = 0.0
    attention: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0


def repeated(model: ModelSizes, remat: str | None) -> Repeated:
    """Return the work that a remat repeats, without a block's last product.

    With "mlp" this work is attention's last product and the MLP, and so one of four exchanges over
    `tensor`.
    """
    spared = model.last_matrix / model.active_matrices
    kept = (model.attention_matrices - model.width * model.attended) / model.active_matrices
    return {
        None: Repeated(),
        GATHERED: Repeated(tensor=0.5),
        MLP: Repeated(1 - spared - kept, tensor=0.25, expert=1.0),
        BUT_ATTENTION: Repeated(1 - spared, 0.0, 1.0, 1.0, 1.0),
        "block": Repeated(1 - spared, 1.0, 1.0, 1.0, 1.0),
        "stage": Repeated(1.0, 1.0, 1.0, 1.0, 1.0),
    }[remat]


class BlockSeconds(NamedTuple):
    """Seconds of one block in one action, of head and lookup, and of their messages.

    Attributes:
      f, i, w, b: forward, the two halves of the backward, and a whole backward, without
        recomputation.
      again: recomputation in the backward.
      sent: by mesh axis: messages of F, and messages of B with its recomputation.
      head, embed: the head, forward and backward, and one lookup.
      head_sent: messages of the head over `tensor`.
    """

    f: float
    i: float
    w: float
    b: float
    again: float
    sent: Mapping[str, tuple[float, float]]
    head: float
    embed: float
    head_sent: float


def block_of(job: PlannedJob, layout: MeshLayout) -> BlockSeconds:
    """Estimate the seconds of a layout's block."""
    sizes = {"rows": layout.rows, "remat": layout.remat, "context": layout.context}
    one = MeshLayout(1, 1, layout.tensor, experts=layout.experts, **sizes)  # type: ignore[arg-type]
    return _block(job, one, links_of(job, layout).tensor)


@functools.lru_cache(maxsize=4096)
def _block(job: PlannedJob, layout: MeshLayout, link: float) -> BlockSeconds:
    model, hbm, experts = job.model, job.chip.hbm_bandwidth, layout.experts
    tokens, again = layout.tokens(job.seq), repeated(model, layout.remat)
    activation = COMPUTE_BYTES * tokens * model.width
    gathered = (layout.tensor - 1) * activation / link
    dispatch, exchange = _exchanges(job, layout)
    sent = {
        "tensor": (4 * gathered, 4 * (1 + again.tensor) * gathered),
        "expert": (dispatch, (1 + again.expert) * dispatch),
        CONTEXT: (exchange, (1 + again.context) * exchange),
    }
    if job.costs:  # measured for the next smaller microbatch, scaled; a whole block is repeated
        count, costs = ([one for one in job.costs if one[0] <= layout.rows] or job.costs[:1])[-1]
        names = ("f", "i", "w", "b", "head", "embed")
        taken = [costs.i + costs.w if (x := getattr(costs, n)) is None else x for n in names]  # type: ignore[operator]
        f, i, w, b, head, embed = (x * layout.rows / count / layout.tensor for x in taken)
        more = f if again.compute else 0.0
        return BlockSeconds(f, i, w, b, more, sent, head, embed, 2 * gathered)
    rate = job.chip.flops * job.efficiency
    multiplied = float(model.active_matrices)
    if model.experts is not None:  # on the rank with the busiest expert
        chosen = model.active_matrices - model.whole_matrices
        multiplied = model.whole_matrices + experts.load(model.experts, job.imbalance) * chosen
    product = 2 * multiplied * tokens / rate
    held = model.whole_matrices / layout.tensor + model.expert_matrices / experts.ranks
    reading = COMPUTE_BYTES * held / hbm  # no product is faster than reading its weights
    passing = PASSES * COMPUTE_BYTES * columns_of(model, experts).read * tokens / hbm
    scores, scores_back = (
        n * model.scores(job.seq) / 2 * tokens / (job.chip.flops * ATTENTION_EFFICIENCY)
        for n in ATTENTION_PRODUCTS
    )
    plain = max(product, reading) + passing
    f, i = plain + scores, plain + passing + scores_back
    w = max(product, 2 * WEIGHT / COMPUTE_BYTES * reading)  # reads and writes sums of gradients
    more = again.compute * plain + again.attention * scores
    logits = PASSES * 4 * model.vocabulary * tokens / hbm
    return BlockSeconds(
        f=f,
        i=SPLIT * i,
        w=SPLIT * w,
        b=i + w,
        again=more,
        sent=sent,
        head=3 * 2 * model.table * tokens / rate + logits,
        embed=4 * activation / hbm,
        head_sent=2 * gathered,
    )


def _exchanges(job: PlannedJob, layout: MeshLayout) -> tuple[float, float]:
    """Return the forward communication time of a block over `expert` and over `context`, in
    seconds, without overlap.
    """
    experts, at, R = job.model.experts, layout.experts, layout.context
    dispatch = exchange = 0.0
    if experts is not None and at.ranks > 1:
        size = COMPUTE_BYTES * layout.tokens(job.seq) * job.model.width
        if at.way == "gather":  # an all-gather of tokens and a reduce-scatter of sums
            dispatch = 2 * (at.ranks - 1) * size / job.chip.ring()
        else:
            dispatch = 2 * all_to_all(job, size * experts.top_k * at.capacity, at.ranks)
    if R > 1:
        exchange = all_to_all(job, R / (R - 1) * context_bytes(job, layout), R)
    return dispatch, exchange


def context_bytes(job: PlannedJob, layout: MeshLayout) -> float:
    """Count the bytes that a rank sends over `context` in one block's F, and again in its B.

    As in `pipeline.layers.context_bytes` for Ulysses, these are queries and results of all heads,
    and keys and values. Each rank has at least one head of keys and values.
    """
    model, R, T = job.model, layout.context, layout.tensor
    heads = model.heads + T * max(model.kv_heads // T, R)
    columns = 2 * heads * (model.queries // model.heads)
    return (R - 1) / R * COMPUTE_BYTES * columns * layout.tokens(job.seq)


def all_to_all(job: PlannedJob, size: float, ranks: int) -> float:
    """Compute the seconds of an all-to-all with ``size`` bytes on each rank.

    In a ring a message passes a quarter of the ring on average, and both directions are used.
    """
    if not job.chip.axes:
        return (ranks - 1) / ranks * size / job.chip.link
    return ranks / 4 * size / job.chip.ring()


# --- links


class Links(NamedTuple):
    """Bandwidth of each axis in bytes a second; `data` and `tensor` within a slice."""

    data: float
    stage: float
    tensor: float


def links_of(job: PlannedJob, layout: MeshLayout) -> Links:
    """Assign torus axes to mesh axes: one to each, and the remaining axes to `data`."""
    chip, left, inside = job.chip, job.chip.axes, layout.stage // layout.stage_slices
    left -= (inside > 1) + (layout.experts.ranks > 1) + (layout.context > 1)
    tensor = 1 if layout.data > layout.data_slices else max(1, left)
    left -= tensor if layout.tensor > 1 else 0
    stage = chip.ring(ranks=inside) if layout.stage_slices == 1 else chip.network
    return Links(chip.ring(max(1, left)), stage, chip.ring(tensor, layout.tensor))


def _shared(job: PlannedJob, layout: MeshLayout, each: tuple[float, float, float]) -> float:
    """Compute seconds of an all-gather or reduce-scatter of weights over ranks with their own rows.

    Ranks of `data` divide the experts' weights. Ranks of `data` and `expert` together divide all
    other weights; without a pipeline, ranks of `context` do too. Between slices each chip sends its
    own part.

    Args:
      each: bytes for a parameter of blocks, of experts and of ends.
    """
    outside = 1 if layout.data_parallel == "hsdp" else layout.data_slices
    inside = layout.data // layout.data_slices
    inside *= layout.context if layout.schedule is None else 1
    link, E, found = links_of(job, layout).data, layout.experts.ranks, 0.0
    held = parameters_of(job.model, layout)
    for number, times, ranks in zip(held, each, (inside * E, inside, inside * E), strict=True):
        found += (ranks - 1) / ranks * times * number / link
        found += (outside - 1) / outside * times * number / ranks / job.chip.network
    return found


# --- a step


def _stage(block: BlockSeconds, n: float) -> tuple[float, float, float, float]:
    forward, backward = map(sum, zip(*block.sent.values(), strict=True))
    more = n * (block.again + backward)
    return n * (block.f + forward), n * block.i + more, n * block.b + more, n * block.w


def _words(job: PlannedJob, layout: MeshLayout) -> float:
    """Compute the seconds that a microbatch's exchanges for a split vocabulary take over `stage`.

    They are 0 unless ``vocabulary="stage"`` divides embedding and head over all ranks of `stage`.
    """
    S, tokens = layout.stage, layout.tokens(job.seq)
    activation = COMPUTE_BYTES * tokens * job.model.width
    sent = 4 * 2 * (S - 1) / S * activation + (S - 1) * 12 * tokens
    return sent / links_of(job, layout).stage if layout.shares_words else 0.0


def _skips(layout: MeshLayout) -> bool:
    """Tell whether the last stage's F computes nothing."""
    words, again = layout.shares_words, layout.remat == "stage"
    free = is_last_forward_free(recomputes=again, shares_head=words, writes=False)
    return layout.schedule is not None and free


def stage_costs(job: PlannedJob, layout: MeshLayout) -> Costs:
    """Return the durations of a pipeline's actions, in seconds."""
    S, block = layout.stage, block_of(job, layout)
    counts = layers_of_stages(job.model.layers, S * layout.chunks)
    f, i, b, w = map(list, zip(*(_stage(block, n) for n in counts), strict=True))
    if _skips(layout):
        f[-1] = 0.0
    size = COMPUTE_BYTES * layout.tokens(job.seq) * job.model.width
    near, far, each = size / job.chip.link, size / job.chip.network, S // layout.stage_slices
    links = [[near if a // each == b // each else far for b in range(S)] for a in range(S)]
    # Each rank computes 1 / S of the shared words, and sends all of its own messages.
    sent = S * _words(job, layout) if layout.shares_words else block.head_sent
    return Costs(
        f=f,
        i=i,
        w=w,
        b=b,
        comm=near if layout.stage_slices == 1 else links,
        head=block.head + sent,
        embed=block.embed,
        host=stash_bytes(job, layout) / job.chip.host if layout.offload else 0.0,
        host_overlap=job.chip.host_overlap,
    )


def estimate(job: PlannedJob, layout: MeshLayout, *, bound: bool = False) -> Estimate:
    """Estimate seconds and bytes of a layout; a ``bound`` leaves out bubble and bytes."""
    S, V, L = layout.stage, layout.chunks, job.model.layers
    M, block, words = layout.microbatches, block_of(job, layout), _words(job, layout)
    skips = _skips(layout) / S  # skipped forwards, for each rank on average
    skipped = skips * L / (S * V)
    own = 0.0 if layout.shares_words else block.head_sent
    seconds = {
        "compute": L / S * (block.f + block.b) + (block.head + 2 * block.embed) / S,
        "recompute": L / S * block.again - skipped * block.f,
        **{axis: (L / S - skipped) * f + L / S * b for axis, (f, b) in block.sent.items()},
        "data": words,
    }
    seconds["tensor"] += own / S
    seconds = {what: M * one for what, one in seconds.items()}
    work = sum(seconds.values())
    seconds |= {"bubble": 0.0, "host": 0.0, "update": _update(job, layout)}
    if layout.schedule is None:
        seconds["data"] = _data_alone(job, layout, work / M)
        seconds["host"] = _host_alone(job, layout, block) if layout.offload else 0.0
        return Estimate(layout, seconds, {} if bound else bytes_of(job, layout), bound)
    seconds["data"] += _data(job, layout)
    if bound:  # the last rank alone has the head, and as many layers as the others
        f, _, b, _ = _stage(block, L / (S * V))
        last = V * (f + b) + block.head + own - S * skips * f
        alone = not layout.shares_words and L % (S * V) == 0
        seconds["bubble"] = max(0.0, M * last - work) if alone else 0.0
        return Estimate(layout, seconds, {}, bound)
    costs, orders = stage_costs(job, layout), layout.order
    shared = ("embed", "head") if layout.shares_words else ()
    whole = makespan(orders, replace(costs, host=0.0), shared, job.clock)
    seconds["bubble"] = whole - work
    if layout.offload:
        keep: Keep = "input" if layout.remat == "stage" else "residuals"
        hosted = makespan(orders, costs, shared, job.clock, layout.offload, keep)
        seconds["host"] = hosted - whole
    return Estimate(layout, seconds, bytes_of(job, layout))


def _data(job: PlannedJob, layout: MeshLayout) -> float:
    """Compute the seconds of a pipeline's sums of gradients, and of new weights gathered by ZeRO-1.

    These collectives run once a step. With windows, chunks are gathered in bfloat16 and their
    gradients reduced in float32 as often as the schedule needs. TPU compilers hide few of these
    collectives (bench/notes/kernel.md), so all count.
    """
    held, way, R = parameters_of(job.model, layout), layout.data_parallel, layout.context
    each = (2.0 * WEIGHT,) * 3
    if way == "windows":
        _, _, gathers, reduces = windows_of(layout.order)
        times = (COMPUTE_BYTES * gathers + WEIGHT * reduces) / layout.chunks
        each = (times, times, WEIGHT + COMPUTE_BYTES)
    seconds = _shared(job, layout, each)
    number = sum(held) if way == "replicated" else held.shard(layout.data, layout.experts.ranks)
    seconds += 2 * (R - 1) / R * WEIGHT * number / job.chip.ring()
    # Ranks that have the ends sum their gradients: over `tensor`, if all stages share the words.
    links, S, T = links_of(job, layout), layout.stage, layout.tensor
    ranks, link = (T, links.tensor) if layout.shares_words else (S, links.stage)
    return seconds + 2 * (ranks - 1) / ranks * WEIGHT * held.ends / layout.rows_ranks / link


def _data_alone(job: PlannedJob, layout: MeshLayout, busy: float) -> float:
    """Compute the seconds of collectives over `data` that a microbatch's work does not hide.

    FSDP gathers bfloat16 weights twice in each microbatch, and reduces bfloat16 gradients once.
    Collectives that run once a step are hidden by the last backward, which is two thirds of a
    microbatch.
    """
    if layout.data_parallel not in ("fsdp", "hsdp"):
        once = _shared(job, layout, (2 * WEIGHT,) * 3)
        return max(0.0, once - busy * 2 / 3)
    sent = _shared(job, layout, (3 * COMPUTE_BYTES,) * 3)
    seconds = layout.microbatches * max(0.0, sent - busy)
    if layout.data_parallel == "hsdp":  # slices sum gradients once
        outside, held = layout.data_slices, parameters_of(job.model, layout)
        part = held.shard(layout.data // outside, layout.experts.ranks)
        once = 2 * (outside - 1) / outside * WEIGHT * part / job.chip.network
        seconds += max(0.0, once - max(0.0, busy - sent) * 2 / 3)
    return seconds


def _host_alone(job: PlannedJob, layout: MeshLayout, block: BlockSeconds) -> float:
    """Compute the seconds of copies to and from host memory that blocks do not hide."""
    copy = left_bytes(job, layout) / job.chip.host
    share = Costs(host_overlap=job.chip.host_overlap).overlaps[0]
    forward, backward = map(sum, zip(*block.sent.values(), strict=True))
    each = max(0.0, copy - share * (block.f + forward))
    each += max(0.0, copy - NEXT_BLOCK * (block.b + block.again + backward))
    return layout.microbatches * job.model.layers * each


def _update(job: PlannedJob, layout: MeshLayout) -> float:
    """Compute the seconds of Adam: it reads and writes weight and moments, and reads the gradient.

    Moments in host memory are copied over the host link, all at once, and then back.
    """
    moments = moment_bytes(layout, parameters_of(job.model, layout))
    seconds = 7 / 2 * moments / job.chip.hbm_bandwidth
    return seconds + (2 * moments / job.chip.host if layout.host_optimizer else 0.0)
