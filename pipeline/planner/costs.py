"""Time of a layout's step, by arithmetic: seconds by use.

Letters as in `pipeline.planner.layout`. Bytes of collectives are those of docs/communication.md,
for sequence parallelism.

No latency is counted, and of a pipeline's collectives over `tensor` and `data` nothing hides behind
work; those of FSDP alone hide as far as they can, so a pipeline must beat it at its best.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.planner.experts import Dispatched
from pipeline.planner.layout import (
    BUT_ATTENTION,
    GATHERED,
    MLP,
    WEIGHT,
    MeshLayout,
    PlannedJob,
    layers_of_stages,
    parameters_alone,
    parameters_of,
)
from pipeline.planner.makespan import makespan, windows_of
from pipeline.planner.memory import (
    alone_bytes,
    left_alone,
    moment_bytes,
    pipeline_bytes,
    stash_bytes,
)
from pipeline.planner.models import COMPUTE_BYTES
from pipeline.planner.sequences import (
    SequenceCut,
    attention_seconds,
    sent_bytes,
    sent_seconds,
    shares,
    with_lengths,
)
from schedules import Costs
from schedules.clocks.hosted import Keep
from schedules.core.costs import is_last_forward_free

# Of peak, in attention kernels: assumed in docs/tpu.md too, and measured nowhere.
ATTENTION_EFFICIENCY = 0.5
# I and W together, over B: cycles of the v5e compiler, docs/schedules.md.
SPLIT = 1.10
# How often what a block sends over `tensor` or `expert` in F is sent in all; 3 where blocks run
# again, 2.25 where their MLPs do.
PASSES: dict[str | None, float] = {None: 2, GATHERED: 2.5, MLP: 2.25}
# Of a block's backward, beside which the next block's activations come back without a pipeline:
# assumed. Programs of recipes hide less for 8B, and nearly as much for 70B (docs/tpu.md).
NEXT_BLOCK = 1 / 3
# Passes through HBM of B, and of a block that is computed again, over those of F (docs/planner.md).
BACKWARD_PASSES, AGAIN_PASSES = 2.0, 0.6


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a layout's step.

    Attributes:
      layout: which.
      seconds: of a step, by what they go to: compute, recompute, bubble, tensor, expert, context,
        data, update.
      bytes: on the fullest chip, by what they hold.
      bound: whether the bubble is left out.
    """

    layout: MeshLayout
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    bound: bool = False

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def hbm(self) -> float:
        """Bytes."""
        return sum(self.bytes.values())


def mfu(job: PlannedJob, step: float) -> float:
    """The model's operations over what the chips could do in a step; of experts, those chosen."""
    tokens = job.batch * job.seq
    return tokens * job.model.step_operations(job.seq) / (job.devices * job.chip.flops * step)


@dataclass(frozen=True)
class _Block:
    """Seconds of one block on a microbatch, of head and lookup, and of what it sends beside.

    With slices those of a slice on average.
    """

    f: float
    i: float
    w: float
    b: float
    again: float  # F in its backward, which has no use for what the last product gives
    mlp: float  # F of the MLP in its backward, likewise
    scores: float  # of F, attention
    scores_back: float  # of B, likewise
    tensor: float  # of one pass
    expert: float  # of one pass
    context: float  # of F
    context_back: float  # of B without what it computes again
    parts: float  # F of experts that take tokens in parts, again in their backward
    head: float
    head_tensor: float
    embed: float

    @property
    def sends(self) -> float:
        """Seconds of F, over all axes."""
        return self.tensor + self.expert + self.context

    @property
    def sends_back(self) -> float:
        """Seconds of B, over all axes."""
        return self.tensor + self.expert + self.context_back


@functools.lru_cache(maxsize=4096)
def _block(
    job: PlannedJob, rows: int, tensor: int, ring: float, experts: Dispatched, cut: SequenceCut
) -> _Block:
    model, chip = job.model, job.chip
    tokens = rows * job.seq / cut.parts
    activation = COMPUTE_BYTES * tokens * model.width
    part = (tensor - 1) / tensor
    passing = 4 * part * activation / ring
    head_tensor = 2 * part * activation / ring
    sent = (sent_seconds(cut, n, chip) for n in sent_bytes(model, cut, rows, job.seq, tensor))
    context, context_back = sent
    dispatch = 0.0 if model.experts is None else experts.seconds(model.experts, activation, chip)
    if job.costs:
        # Of the next smaller microbatch that was measured, in proportion.
        known = [one for one in job.costs if one[0] <= rows] or [job.costs[0]]
        count, costs = known[-1]
        f, i, w, head, embed = (
            float(getattr(costs, name)) * rows / count / tensor
            for name in ("f", "i", "w", "head", "embed")
        )
        b = i + w if costs.b is None else float(costs.b) * rows / count / tensor  # type: ignore[arg-type]
        parts = experts.passes * f  # not measured apart: all of it
        over = passing, dispatch, context, context_back, parts
        return _Block(f, i, w, b, f, f, 0.0, 0.0, *over, head, head_tensor, embed)
    rate = chip.flops * job.efficiency * tensor
    multiplied = float(model.active_matrices)
    if model.experts is not None:  # of the rank with the busiest expert
        load = experts.load(model.experts, job.imbalance)
        multiplied = model.whole_matrices + load * model.chosen_matrices
    product = 2 * multiplied * tokens / rate
    rates = {"efficiency": ATTENTION_EFFICIENCY if cut.by_kernel else job.efficiency}
    scores, scores_back = attention_seconds(model, chip, cut, tokens / tensor, job.seq, **rates)
    held = model.whole_matrices / tensor + model.expert_matrices / experts.ranks
    weights = held / chip.hbm_bandwidth  # seconds to read one byte of each
    read = model.plain_residuals(replace(experts, part=1.0)) * tokens / tensor
    passes = chip.passes * read / chip.hbm_bandwidth
    logits = chip.passes * 4 * model.vocabulary * tokens / tensor / chip.hbm_bandwidth
    last = model.last_matrix / model.active_matrices  # of the products
    through = max(product, COMPUTE_BYTES * weights)
    mixed = 0.0  # of the products, experts
    if model.experts is not None:
        mixed = load * model.chosen_matrices / multiplied
    f = through + passes + scores
    i = through + BACKWARD_PASSES * passes + scores_back
    w = max(product, 2 * WEIGHT * weights)  # sums of gradients are read and written
    return _Block(
        f=f,
        i=SPLIT * i,
        w=SPLIT * w,
        b=i + w,
        again=(1 - last) * through + AGAIN_PASSES * passes + scores,
        mlp=model.mlp_share[0] * through + model.mlp_share[1] * AGAIN_PASSES * passes,
        scores=scores,
        scores_back=scores_back,
        tensor=passing,
        expert=dispatch,
        context=context,
        context_back=context_back,
        parts=experts.passes * mixed * (through + AGAIN_PASSES * passes),
        head=3 * 2 * model.table * tokens / rate + logits,
        head_tensor=head_tensor,
        embed=4 * activation / tensor / chip.hbm_bandwidth,
    )


@dataclass(frozen=True)
class _Links:
    """Bytes a second of each axis within a slice."""

    data: float
    stage: float
    tensor: float


def _block_of(job: PlannedJob, layout: MeshLayout, links: _Links) -> _Block:
    sizes = layout.rows, layout.tensor, links.tensor
    return _block(job, *sizes, layout.experts, layout.cut)


def _links(job: PlannedJob, layout: MeshLayout) -> _Links:
    """Axes of the torus: one for each of the others as long as there are, the rest for `data`."""
    chip, left = job.chip, job.chip.axes
    if not left:
        return _Links(chip.link, chip.link, chip.link)
    has_stage = layout.stage > layout.stage_slices
    has_data = layout.data > layout.data_slices
    left -= has_stage + (layout.experts.ranks > 1) + (layout.cut.ranks > 1)
    tensor = 1 if has_data else max(1, left)
    left -= tensor if layout.tensor > 1 else 0
    inside = layout.stage // layout.stage_slices
    return _Links(
        chip.ring(max(1, left)), chip.ring(ranks=inside), chip.ring(tensor, layout.tensor)
    )


def _gather(size: float, inside: int, outside: int, link: float, network: float) -> float:
    """Seconds of an all-gather or reduce-scatter: between slices each chip has its part alone."""
    seconds = (inside - 1) / inside * size / link
    return seconds + (outside - 1) / outside * size / inside / network


def _shared(
    job: PlannedJob, layout: MeshLayout, links: _Links, whole: float, own: float, *, across: int = 0
) -> float:
    """Seconds of an all-gather or reduce-scatter of weights over the ranks with rows of their own.

    Args:
      job: what is trained.
      layout: how.
      links: of the slice.
      whole: bytes that the ranks of `expert` share too.
      own: bytes that only those of `data` share.
      across: slices that share; all along `data` by default.
    """
    inside, outside = layout.data // layout.data_slices, across or layout.data_slices
    network = job.chip.network
    if layout.schedule is None:  # which shards over `context` too
        inside *= layout.cut.ranks
    return _gather(whole, inside * layout.experts.ranks, outside, links.data, network) + _gather(
        own, inside, outside, links.data, network
    )


def _messages(
    job: PlannedJob, layout: MeshLayout, activation: float
) -> float | tuple[tuple[float, ...], ...]:
    """Seconds of a message between ranks of stages."""
    size = activation / layout.tensor
    near, far = size / job.chip.link, size / job.chip.network
    if layout.stage_slices == 1:
        return near
    S, each = layout.stage, layout.stage // layout.stage_slices
    return tuple(tuple(near if a // each == b // each else far for b in range(S)) for a in range(S))


@dataclass(frozen=True)
class _Stage:
    """Seconds of one stage on one microbatch, FSDP's gathers included, and of head and lookup.

    With slices those of a slice on average.
    """

    f: float
    i: float
    b: float
    w: float
    head: float
    embed: float
    gather: float


def _stage(job: PlannedJob, layout: MeshLayout, links: _Links, block: _Block, n: float) -> _Stage:
    """Estimate a stage of n layers."""
    S, T, V = layout.stage, layout.tensor, layout.chunks
    gather = 0.0
    if layout.data_parallel == "fsdp":
        model, each = job.model, WEIGHT * job.model.layers / (S * V)
        whole = each * (model.block - model.expert_matrices) / T
        own = each * model.expert_matrices / layout.experts.ranks
        gather = _shared(job, layout, links, whole, own)
    forward = n * (block.f + block.sends)
    beside = n * block.sends_back + _again(layout, block, n) + gather
    over_tensor, words = _head_sends(job, layout, links, block)
    return _Stage(
        f=forward + gather,
        i=n * block.i + beside,
        b=n * block.b + beside,
        w=n * block.w,
        head=block.head + over_tensor + S * words,  # of words on all ranks each does 1/S, sends all
        embed=block.embed,
        gather=gather,
    )


def _again(layout: MeshLayout, block: _Block, n: float) -> float:
    """Seconds of what the backward of n blocks computes again."""
    parts = n * (block.parts + layout.experts.passes * block.expert)
    if layout.remat is None:
        return parts
    if layout.remat == GATHERED:
        return parts + n * (PASSES[GATHERED] - PASSES[None]) * block.tensor  # experts' are kept
    if layout.remat == "stage":  # all but the last of its blocks give what the next begins with
        return parts + (n - 1) * block.f + block.again + n * block.sends
    if layout.remat == MLP:
        return parts + n * block.mlp
    kept = block.scores if layout.remat == BUT_ATTENTION else 0.0
    return parts + n * (block.again - kept + block.sends)


def _head_sends(
    job: PlannedJob, layout: MeshLayout, links: _Links, block: _Block
) -> tuple[float, float]:
    """Seconds of what a microbatch's head sends over `tensor`, and of what all of `stage` do."""
    if layout.vocabulary == "stage":
        return 0.0, _words(job, layout, links)
    return block.head_tensor, 0.0


def _words(job: PlannedJob, layout: MeshLayout, links: _Links) -> float:
    """Seconds that all ranks of `stage` exchange on the words of a microbatch.

    Ranks of `tensor` have positions of their own.
    """
    S, tokens = layout.stage, layout.tokens(job.seq) / layout.tensor
    activation = COMPUTE_BYTES * tokens * job.model.width
    sent = 4 * 2 * (S - 1) / S * activation + (S - 1) * 12 * tokens
    return sent / (links.stage if layout.stage_slices == 1 else job.chip.network)


def _skips(layout: MeshLayout) -> bool:
    """Tell whether the last stage's F computes nothing; of slices it leaves keys and values."""
    if layout.cut.slices > 1:
        return False
    return is_last_forward_free(
        recomputes=layout.remat == "stage", shares_head=layout.vocabulary == "stage", writes=False
    )


def stage_costs(job: PlannedJob, layout: MeshLayout) -> Costs:
    """Durations of a pipeline's actions, in seconds."""
    links, N = _links(job, layout), layout.cut.slices
    block = _block_of(job, layout, links)
    activation = COMPUTE_BYTES * layout.tokens(job.seq) * job.model.width
    counts = layers_of_stages(job.model.layers, layout.stage * layout.chunks)
    stages = [_stage(job, layout, links, block, n) for n in counts]
    f = [one.f for one in stages]
    if _skips(layout):
        f[-1] = 0.0
    return Costs(  # of a microbatch, of which a schedule gives each slice its part
        f=[N * one for one in f],
        i=[N * one.i for one in stages],
        w=[N * one.w for one in stages],
        b=[N * one.b for one in stages],
        comm=_messages(job, layout, N * activation),
        head=N * stages[-1].head,
        embed=N * stages[0].embed,
        host=stash_bytes(job, layout) / job.chip.host if layout.offload else 0.0,
        host_overlap=job.chip.host_overlap,
        slices=shares(layout.cut, _attention(layout, block)),
    )


def _attention(layout: MeshLayout, block: _Block) -> float:
    """The share of attention in the time of a block's F and B."""
    runs = 1 if layout.remat in PASSES else 2
    other = block.f + block.b + (runs - 1) * block.again
    return (runs * block.scores + block.scores_back) / other


def with_equal_slices(job: PlannedJob, layout: MeshLayout) -> MeshLayout | None:
    """Give the slices of a layout lengths of equal time; None where a kernel does not take them.

    Kernels of TPUs take slices of given lengths where a rank has whole slices of its heads, and the
    head is on the last rank.
    """
    cut = layout.cut
    if not job.chip.axes or layout.vocabulary == "stage":
        return None
    if cut.ranks > 1 and cut.way != "ulysses":
        return None
    links = _links(job, layout)
    whole = replace(layout, cut=replace(cut, slices=1))
    share = _attention(layout, _block_of(job, whole, links))
    found = with_lengths(cut, job.seq, layout.tensor, share)
    return None if found is None else replace(layout, cut=found)


def estimate(job: PlannedJob, layout: MeshLayout, *, bound: bool = False) -> Estimate:
    """Seconds and bytes of a layout.

    Args:
      job: what is trained.
      layout: how it is spread.
      bound: without the bubble, which is what takes time to find, and without bytes.
    """
    if layout.schedule is None:
        return Estimate(
            layout, _alone(job, layout), {} if bound else alone_bytes(job, layout), bound
        )
    S, V, N = layout.stage, layout.chunks, layout.cut.slices
    units = layout.microbatches * N  # of work, a slice of a microbatch each
    links = _links(job, layout)
    block = _block_of(job, layout, links)
    one = _stage(job, layout, links, block, job.model.layers / (S * V))
    layers, passes = job.model.layers / S, PASSES.get(layout.remat, 3)
    over_tensor, words = _head_sends(job, layout, links, block)
    sizes = layout.schedule, S, V, layout.microbatches
    skips = _skips(layout)  # the last stage spares a forward, with what it sends
    spared = one.f * skips
    ends = one.head + 2 * one.embed
    work = units * (V * (one.f + one.b) + (ends - spared) / S)
    if bound:  # the last rank has the head to itself, and layers like all
        shares = layout.vocabulary == "stage" or job.model.layers % (S * V) > 0
        last = units * (V * (one.f + one.b) + one.head - spared)
        whole = work if shares else max(work, last)
    else:
        shared = ("embed", "head") if layout.vocabulary == "stage" else ()
        costs = stage_costs(job, layout)
        whole = makespan(*sizes, replace(costs, host=0.0), shared, job.clock, N=N)
    compute = units * (layers * (block.f + block.b) + (block.head + 2 * block.embed) / S)
    tensor = units * ((passes - skips / (S * V)) * layers * block.tensor + over_tensor / S)
    again = (2 if layout.remat == GATHERED else passes) + layout.experts.passes
    runs = 1 if layout.remat in PASSES else 2  # of a forward
    context = units * (runs - skips / (S * V)) * layers * block.context
    context += units * layers * block.context_back
    expert = units * (again - skips / (S * V)) * layers * block.expert
    gathers = units * ((2 * V - skips / S) * one.gather + words)
    moved = _in_windows(job, layout, links) if layout.data_parallel == "windows" else 0.0
    seconds = {
        "compute": compute,
        # And what halves of backwards add.
        "recompute": work - compute - tensor - expert - context - gathers,
        "bubble": whole - work,
        "tensor": tensor,
        "expert": expert,
        "context": context,
        "data": gathers + moved + _reduce(job, layout, links),
        "update": _update(job, layout),
    }
    if layout.offload and not bound:
        keep: Keep = "input" if layout.remat == "stage" else "residuals"
        moved = makespan(*sizes, costs, shared, job.clock, layout.offload, keep)
        seconds["host"] = moved - whole
    return Estimate(layout, seconds, {} if bound else pipeline_bytes(job, layout), bound)


def sent_over_context(job: PlannedJob, layout: MeshLayout) -> float:
    """Bytes that a chip sends over `context` in a step's attention, the mean over ranks of `stage`.

    Gradients of weights, which are summed over it once a step, come beside.
    """
    forward, backward = sent_bytes(job.model, layout.cut, layout.rows, job.seq, layout.tensor)
    S, units = layout.stage, layout.microbatches * layout.cut.slices
    runs = 1.0 if layout.remat in PASSES else 2.0
    if layout.schedule is not None:
        runs -= _skips(layout) / (S * layout.chunks)
    return units * job.model.layers / S * (runs * forward + backward)


def _reduce(job: PlannedJob, layout: MeshLayout, links: _Links) -> float:
    """Seconds, once a step: gradients are summed, and ZeRO-1 gathers new weights."""
    held, network = parameters_of(job, layout), job.chip.network
    # Gradients, and new weights.
    times = WEIGHT * (1 if layout.data_parallel == "fsdp" else 2)
    whole, own = times * (held.whole + held.ends), times * held.experts
    if layout.data_parallel == "windows":  # their chunks were moved before
        whole, own = (WEIGHT + COMPUTE_BYTES) * held.ends, 0.0
    seconds = _shared(job, layout, links, whole, own)
    if layout.cut.ranks > 1:  # an all-reduce over `context`, of a shard where there are any
        is_whole = layout.data_parallel == "replicated"
        own = held.all if is_whole else held.shards(layout.data, layout.experts.ranks)
        R = layout.cut.ranks
        seconds += 2 * (R - 1) / R * WEIGHT * own / job.chip.ring()
    ends = WEIGHT * held.ends / layout.rows_ranks
    if layout.vocabulary == "ends":
        S = layout.stage
        link = links.stage if layout.stage_slices == 1 else network
        seconds += 2 * (S - 1) / S * ends / link
    elif layout.schedule is not None:  # each rank of `tensor` has a sum over its positions
        T = layout.tensor
        seconds += 2 * (T - 1) / T * ends / links.tensor
    return seconds


def _in_windows(job: PlannedJob, layout: MeshLayout, links: _Links) -> float:
    """Seconds of a step in which chunks are gathered in bfloat16, and gradients reduced in float32.

    Compilers for TPUs let most of these stand alone (docs/kernel.md), so none counts as hidden.
    """
    held, sizes = parameters_of(job, layout), (layout.stage, layout.chunks, layout.microbatches)
    _, _, gathers, reduces = windows_of(layout.schedule or "", *sizes)
    times = (COMPUTE_BYTES * gathers + WEIGHT * reduces) / layout.chunks
    return _shared(job, layout, links, times * held.whole, times * held.experts)


def _update(job: PlannedJob, layout: MeshLayout) -> float:
    """Seconds of Adam: weight and moments are read and written, the gradient is read.

    Moments in host memory come over the host link, all at once, and then go back.
    """
    alone = layout.schedule is None
    held = parameters_alone(job, layout) if alone else parameters_of(job, layout)
    shared = layout.data // (layout.data_slices if layout.data_parallel == "hsdp" else 1)
    own = held.all
    if layout.data_parallel != "replicated":
        own = held.shards(shared, layout.experts.ranks * (layout.cut.ranks if alone else 1))
    seconds = 7 * WEIGHT * own / job.chip.hbm_bandwidth
    if layout.host_optimizer:
        seconds += 2 * moment_bytes(layout, held) / job.chip.host
    return seconds


def _alone(job: PlannedJob, layout: MeshLayout) -> dict[str, float]:
    """Seconds without a pipeline: data and tensor parallelism, collectives beside work."""
    model, links, M = job.model, _links(job, layout), layout.microbatches
    block = _block_of(job, layout, links)
    L = model.layers
    passes = PASSES.get(layout.remat, 3)
    compute = M * (L * (block.f + block.b) + block.head + 2 * block.embed)
    recompute = M * _again(layout, replace(block, tensor=0.0, expert=0.0, context=0.0), L)
    tensor = M * (L * passes * block.tensor + block.head_tensor)
    again = 2 if layout.remat is None else 3
    expert = M * L * (again + layout.experts.passes) * block.expert
    again = 1 if layout.remat in PASSES else 2
    context = M * L * (again * block.context + block.context_back)
    busy = (compute + recompute + tensor + expert + context) / M
    outside, network = layout.data_slices, job.chip.network
    held = parameters_alone(job, layout)
    whole, own = held.whole + held.ends, held.experts
    if layout.data_parallel in ("fsdp", "hsdp"):
        # Each microbatch gathers bfloat16 weights twice and reduces bfloat16 gradients once.
        across = outside if layout.data_parallel == "fsdp" else 1
        times = 3 * COMPUTE_BYTES
        sent = _shared(job, layout, links, times * whole, times * own, across=across)
        data = M * max(0.0, sent - busy)
        if layout.data_parallel == "hsdp":  # slices sum once, beside the last backward
            inside = layout.data // outside
            part = held.shards(inside, layout.experts.ranks)
            once = 2 * (outside - 1) / outside * WEIGHT * part / network
            data += max(0.0, once - max(0.0, busy - sent) * 2 / 3)
    else:
        times = 2 * WEIGHT
        once = _shared(job, layout, links, times * whole, times * own)
        data = max(0.0, once - busy * 2 / 3)
    host = 0.0
    if layout.offload:
        link = left_alone(job, layout) / job.chip.host
        write, _ = Costs(host_overlap=job.chip.host_overlap).overlaps
        backward = block.b + block.sends_back + _again(layout, block, 1)
        host = max(0.0, link - write * (block.f + block.sends))
        host += max(0.0, link - NEXT_BLOCK * backward)
    return {
        "compute": compute,
        "recompute": recompute,
        "bubble": 0.0,
        "host": M * L * host,
        "tensor": tensor,
        "expert": expert,
        "context": context,
        "data": data,
        "update": _update(job, layout),
    }
