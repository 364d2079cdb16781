"""What a step of a layout costs, by arithmetic: seconds by use, bytes by what they hold.

Letters: S, D, T ranks on `stage`, `data`, `tensor`; V stages on a rank, M microbatches. Bytes of
collectives are those of docs/communication.md, for sequence parallelism. Weights, sums of gradients
and Adam's two moments are float32, all else bfloat16.

No latency is counted, and of a pipeline's collectives over `tensor` and `data` nothing hides behind
work; those of FSDP alone hide as far as they can, so a pipeline must beat it at its best.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.planner.chips import Chip
from pipeline.planner.makespan import makespan, peak
from pipeline.planner.models import COMPUTE_BYTES, ModelSizes
from schedules import Costs

WEIGHT = 4  # bytes of a parameter, of its gradient and of each of Adam's moments

# Of peak, in attention kernels: assumed in docs/llama.md too, and measured nowhere.
ATTENTION_EFFICIENCY = 0.5
# Products of an attention kernel: forward, and backward with scores formed again (docs/llama.md).
FORWARD_SCORES, BACKWARD_SCORES = 2, 7
# I and W together, over B: cycles of the v5e compiler, docs/schedules.md.
SPLIT = 1.10
# Parts in which a head forms its logits (`loss_chunks=`), where not all ranks share it.
LOGIT_PARTS = 8
# What of a chip's memory a plan may take: docs/llama.md has compiled / predicted up to 1.01.
USABLE = 0.95


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
      model: its sizes.
      chip: which.
      devices: chips, equally many in each slice.
      batch: sequences of a step.
      seq: their positions.
      slices: groups of chips that only the network joins; of GPUs, hosts.
      clock: "lockstep", as the kernel runs, with exchanges that only partners wait for, or "event".
      efficiency: of the products of a block, of peak.
      costs: seconds of one block and one sequence on one chip, without recomputation, instead.
    """

    model: ModelSizes
    chip: Chip
    devices: int
    batch: int
    seq: int
    slices: int
    clock: str
    efficiency: float
    costs: Costs | None = None


@dataclass(frozen=True)
class Layout:
    """One way to spread a job.

    Attributes:
      data: D.
      stage: S.
      tensor: T.
      data_slices: of D, how many lie in slices of their own.
      stage_slices: of S, likewise.
      schedule: of the pipeline; None where stage is 1.
      chunks: V.
      microbatches: M.
      rows: sequences of a microbatch on a data shard.
      remat: what is computed again: None, each "block" from its input, each "stage" from its own.
      data_parallel: "replicated", "zero1" or "fsdp" (of a pipeline: gathered in every action), or
        "hsdp": weights over the data shards of a slice.
      vocabulary: "ends" or "stage".
    """

    data: int
    stage: int
    tensor: int
    data_slices: int = 1
    stage_slices: int = 1
    schedule: str | None = None
    chunks: int = 1
    microbatches: int = 1
    rows: int = 1
    remat: str | None = None
    data_parallel: str = "replicated"
    vocabulary: str = "ends"

    @property
    def mesh(self) -> tuple[int, int, int]:
        """D, S and T."""
        return self.data, self.stage, self.tensor


@dataclass(frozen=True)
class Estimate:
    """What a layout is to take.

    Attributes:
      layout: which.
      seconds: of a step, by what they go to: compute, recompute, bubble, tensor, data, update.
      bytes: on the fullest chip, by what they hold.
      bound: whether the bubble is left out.
    """

    layout: Layout
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


def usable(job: Job) -> float:
    """Bytes of a chip that a plan may take."""
    return USABLE * job.chip.hbm


def mfu(job: Job, step: float) -> float:
    """The model's operations over what the chips could do in a step."""
    tokens = job.batch * job.seq
    return tokens * job.model.step_operations(job.seq) / (job.devices * job.chip.flops * step)


@dataclass(frozen=True)
class _Block:
    """Seconds of one block on one microbatch, of head and lookup, and of `tensor` beside."""

    f: float
    i: float
    w: float
    b: float
    tensor: float  # of one pass
    head: float
    head_tensor: float
    embed: float


@functools.lru_cache(maxsize=4096)
def _block(job: Job, rows: int, tensor: int, ring: float) -> _Block:
    model, chip = job.model, job.chip
    tokens = rows * job.seq
    activation = COMPUTE_BYTES * tokens * model.width
    part = (tensor - 1) / tensor
    passing = 4 * part * activation / ring
    head_tensor = 2 * part * activation / ring
    if job.costs is not None:
        f, i, w, head, embed = (
            float(getattr(job.costs, name)) * rows / tensor
            for name in ("f", "i", "w", "head", "embed")
        )
        b = i + w if job.costs.b is None else float(job.costs.b) * rows / tensor  # type: ignore[arg-type]
        return _Block(f, i, w, b, passing, head, head_tensor, embed)
    rate = chip.flops * job.efficiency * tensor
    product = 2 * model.block_matrices * tokens / rate
    score = model.scores(job.seq) / FORWARD_SCORES * tokens / tensor
    score /= chip.flops * ATTENTION_EFFICIENCY
    weights = model.block_matrices / tensor / chip.hbm_bandwidth  # seconds to read one byte of each
    f = max(product, COMPUTE_BYTES * weights) + FORWARD_SCORES * score
    i = max(product, COMPUTE_BYTES * weights) + BACKWARD_SCORES * score
    w = max(product, 2 * WEIGHT * weights)  # sums of gradients are read and written
    return _Block(
        f=f,
        i=SPLIT * i,
        w=SPLIT * w,
        b=i + w,
        tensor=passing,
        head=3 * 2 * model.table * tokens / rate,
        head_tensor=head_tensor,
        embed=4 * activation / tensor / chip.hbm_bandwidth,
    )


@dataclass(frozen=True)
class _Links:
    """Bytes a second of each axis within a slice."""

    data: float
    stage: float
    tensor: float


def _links(job: Job, layout: Layout) -> _Links:
    """Axes of the torus: one for `stage`, one for `tensor`, the rest for `data`."""
    chip, left = job.chip, job.chip.axes
    if not left:
        return _Links(chip.link, chip.link, chip.link)
    has_stage = layout.stage > layout.stage_slices
    has_data = layout.data > layout.data_slices
    left -= has_stage
    tensor = 1 if has_data else max(1, left)
    left -= tensor if layout.tensor > 1 else 0
    return _Links(chip.ring(max(1, left)), chip.ring(), chip.ring(tensor))


def _gather(size: float, inside: int, outside: int, link: float, network: float) -> float:
    """Seconds of an all-gather or reduce-scatter: between slices each chip has its part alone."""
    seconds = (inside - 1) / inside * size / link
    return seconds + (outside - 1) / outside * size / inside / network


def _messages(job: Job, layout: Layout, activation: float) -> float | tuple[tuple[float, ...], ...]:
    """Seconds of a message between ranks of stages."""
    size = activation / layout.tensor
    near, far = size / job.chip.link, size / job.chip.network
    if layout.stage_slices == 1:
        return near
    S, each = layout.stage, layout.stage // layout.stage_slices
    return tuple(tuple(near if a // each == b // each else far for b in range(S)) for a in range(S))


@dataclass(frozen=True)
class _Stage:
    """Seconds of one stage on one microbatch, FSDP's gathers included, and of head and lookup."""

    f: float
    i: float
    b: float
    w: float
    head: float
    embed: float
    gather: float


def _stage(job: Job, layout: Layout, links: _Links, block: _Block, n: float) -> _Stage:
    """Of a stage of n layers."""
    S, T, V = layout.stage, layout.tensor, layout.chunks
    gather = 0.0
    if layout.data_parallel == "fsdp":
        size = WEIGHT * job.model.layers * job.model.block / (S * V * T)
        inside = layout.data // layout.data_slices
        gather = _gather(size, inside, layout.data_slices, links.data, job.chip.network)
    forward = n * (block.f + block.tensor)
    beside = n * block.tensor + (0.0 if layout.remat is None else forward) + gather
    head = block.head + block.head_tensor
    if layout.vocabulary == "stage":
        head += S * _words(job, layout, links)  # a rank does 1/S of the head, and all of this
    return _Stage(
        f=forward + gather,
        i=n * block.i + beside,
        b=n * block.b + beside,
        w=n * block.w,
        head=head,
        embed=block.embed,
        gather=gather,
    )


def _words(job: Job, layout: Layout, links: _Links) -> float:
    """Seconds that all ranks of `stage` exchange on the words of a microbatch."""
    S, tokens = layout.stage, layout.rows * job.seq
    activation = COMPUTE_BYTES * tokens * job.model.width
    sent = 4 * 2 * (S - 1) / S * activation + (S - 1) * 12 * tokens
    return sent / (links.stage if layout.stage_slices == 1 else job.chip.network)


def stage_costs(job: Job, layout: Layout) -> Costs:
    """Durations of a pipeline's actions, in seconds."""
    links = _links(job, layout)
    block = _block(job, layout.rows, layout.tensor, links.tensor)
    activation = COMPUTE_BYTES * layout.rows * job.seq * job.model.width
    counts = layers_of_stages(job.model.layers, layout.stage * layout.chunks)
    stages = [_stage(job, layout, links, block, n) for n in counts]
    f = [one.f for one in stages]
    if layout.remat == "stage":
        f[-1] = 0.0  # its B runs it anyway
    return Costs(
        f=f,
        i=[one.i for one in stages],
        w=[one.w for one in stages],
        b=[one.b for one in stages],
        comm=_messages(job, layout, activation),
        head=stages[-1].head,
        embed=stages[0].embed,
    )


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many each has; where they differ by one, the ends of the pipeline have less."""
    longest = -(-layers // stages)
    short = longest * stages - layers
    first = short // 2
    even = stages - short
    return [longest - 1] * first + [longest] * even + [longest - 1] * (short - first)


def _parameters(job: Job, layout: Layout) -> tuple[float, float]:
    """Of a rank's blocks, and of what it has of embedding and head."""
    model = job.model
    longest = -(-model.layers // (layout.stage * layout.chunks))
    blocks = layout.chunks * longest * model.block / layout.tensor
    return blocks, model.ends / (layout.stage if layout.vocabulary == "stage" else layout.tensor)


def estimate(job: Job, layout: Layout, *, bound: bool = False) -> Estimate:
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
    S, M, V = layout.stage, layout.microbatches, layout.chunks
    links = _links(job, layout)
    block = _block(job, layout.rows, layout.tensor, links.tensor)
    one = _stage(job, layout, links, block, job.model.layers / (S * V))
    layers, passes = job.model.layers / S, 2 if layout.remat is None else 3
    words = _words(job, layout, links) if layout.vocabulary == "stage" else 0.0
    skips = layout.remat == "stage"  # the last stage spares a forward, with what it sends
    spared = one.f * skips
    ends = one.head + 2 * one.embed
    work = M * (V * (one.f + one.b) + (ends - spared) / S)
    if bound:  # the last rank has the head to itself, and layers like all
        shares = layout.vocabulary == "stage" or job.model.layers % (S * V) > 0
        last = M * (V * (one.f + one.b) + one.head - spared)
        whole = work if shares else max(work, last)
    else:
        shared = ("embed", "head") if layout.vocabulary == "stage" else ()
        costs = stage_costs(job, layout)
        whole = makespan(layout.schedule, S, V, M, costs, shared, job.clock)
    compute = M * (layers * (block.f + block.b) + (block.head + 2 * block.embed) / S)
    tensor = M * ((passes - skips / (S * V)) * layers * block.tensor + block.head_tensor / S)
    gathers = M * ((2 * V - skips / S) * one.gather + words)
    seconds = {
        "compute": compute,
        "recompute": work - compute - tensor - gathers,  # and what halves of backwards add
        "bubble": whole - work,
        "tensor": tensor,
        "data": gathers + _reduce(job, layout, links),
        "update": _update(job, layout),
    }
    return Estimate(layout, seconds, {} if bound else pipeline_bytes(job, layout), bound)


def _reduce(job: Job, layout: Layout, links: _Links) -> float:
    """Seconds, once a step: gradients are summed, and ZeRO-1 gathers new weights."""
    blocks, ends = _parameters(job, layout)
    inside, outside = layout.data // layout.data_slices, layout.data_slices
    gradients = WEIGHT * (blocks + ends)
    weights = 0.0 if layout.data_parallel == "fsdp" else gradients
    network = job.chip.network
    seconds = _gather(gradients + weights, inside, outside, links.data, network)
    if layout.vocabulary == "ends":
        S = layout.stage
        link = links.stage if layout.stage_slices == 1 else network
        seconds += 2 * (S - 1) / S * WEIGHT * ends / layout.data / link
    return seconds


def _update(job: Job, layout: Layout) -> float:
    """Seconds of Adam: weight and moments are read and written, the gradient is read."""
    parts = 1 if layout.data_parallel == "replicated" else layout.data
    if layout.data_parallel == "hsdp":
        parts //= layout.data_slices
    return 7 * WEIGHT * sum(_parameters(job, layout)) / parts / job.chip.hbm_bandwidth


def _alone(job: Job, layout: Layout) -> dict[str, float]:
    """Seconds without a pipeline: data and tensor parallelism, collectives beside work."""
    model, links, M = job.model, _links(job, layout), layout.microbatches
    block = _block(job, layout.rows, layout.tensor, links.tensor)
    L = model.layers
    passes = 2 if layout.remat is None else 3
    compute = M * (L * (block.f + block.b) + block.head + 2 * block.embed)
    recompute = 0.0 if layout.remat is None else M * L * block.f
    tensor = M * (L * passes * block.tensor + block.head_tensor)
    busy = (compute + recompute + tensor) / M
    inside, outside = layout.data // layout.data_slices, layout.data_slices
    size, network = model.parameters / layout.tensor, job.chip.network
    if layout.data_parallel in ("fsdp", "hsdp"):
        # Each microbatch gathers bfloat16 weights twice and reduces bfloat16 gradients once.
        across = outside if layout.data_parallel == "fsdp" else 1
        sent = _gather(3 * COMPUTE_BYTES * size, inside, across, links.data, network)
        data = M * max(0.0, sent - busy)
        if layout.data_parallel == "hsdp":  # slices sum once, beside the last backward
            once = 2 * (outside - 1) / outside * WEIGHT * size / inside / network
            data += max(0.0, once - max(0.0, busy - sent) * 2 / 3)
    else:
        once = _gather(2 * WEIGHT * size, inside, outside, links.data, network)
        data = max(0.0, once - busy * 2 / 3)
    return {
        "compute": compute,
        "recompute": recompute,
        "bubble": 0.0,
        "tensor": tensor,
        "data": data,
        "update": _update(job, layout),
    }


def _block_bytes(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Of one block and microbatch: its input, its residuals, and what an action holds beside."""
    tokens = layout.rows * job.seq / layout.tensor
    whole = COMPUTE_BYTES * layout.rows * job.seq * job.model.width
    residuals = job.model.residuals * tokens
    # Residuals and their gradients; under sequence parallelism also what was gathered.
    beside = 2 * residuals + (4 * whole if layout.tensor > 1 else 0.0)
    return whole / layout.tensor, residuals, beside


def _logits(job: Job, layout: Layout) -> float:
    """Bytes of logits and their gradient, float32."""
    parts = layout.stage if layout.vocabulary == "stage" else layout.tensor * LOGIT_PARTS
    return 2 * 4 * layout.rows * job.seq * job.model.vocabulary / parts


def pipeline_bytes(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes of a chip, as the kernel holds them."""
    S, V, D, M = layout.stage, layout.chunks, layout.data, layout.microbatches
    blocks, ends = _parameters(job, layout)
    n = -(-job.model.layers // (S * V))
    given, residuals, beside = _block_bytes(job, layout)
    stash = {None: n * residuals, "block": n * given, "stage": given}[layout.remat]
    workspace = beside + (n * residuals if layout.remat == "stage" else 0.0)
    crossing = n * job.model.crossings * layout.rows * job.seq / layout.tensor
    schedule = layout.schedule or ""
    weights, optimizer = WEIGHT * (blocks + ends), 2 * WEIGHT * (blocks + ends)
    held = {
        "weights": weights,
        "optimizer": optimizer / (1 if layout.data_parallel == "replicated" else D),
        "gradients": weights,
        "stashes": peak(schedule, S, V, M, stash, crossing),
        # Float32 weights that all microbatches read are cast once, of blocks and not of tables.
        "weights cast": COMPUTE_BYTES * blocks,
        "messages": 2 * V * given,
        "workspace": max(workspace, _logits(job, layout)),
    }
    if layout.data_parallel == "fsdp":
        held["weights"] /= D
        held["weights cast"] = (COMPUTE_BYTES + WEIGHT) * blocks / V  # of one action
    return held


def alone_bytes(job: Job, layout: Layout) -> dict[str, float]:
    """Bytes of a chip without a pipeline."""
    model, L = job.model, job.model.layers
    size = WEIGHT * model.parameters / layout.tensor
    shards = {"fsdp": layout.data, "hsdp": layout.data // layout.data_slices}
    parts = shards.get(layout.data_parallel, 1)
    moments = layout.data if layout.data_parallel == "zero1" else parts
    given, residuals, beside = _block_bytes(job, layout)
    # Of two blocks, the next is gathered meanwhile, and one block's gradient; or all, cast.
    cast = 3 * COMPUTE_BYTES * model.block / layout.tensor if parts > 1 else size / 2
    return {
        "weights": size / parts,
        "optimizer": 2 * size / moments,
        "gradients": size / parts,
        "stashes": L * (residuals if layout.remat is None else given),
        "weights cast": cast,
        "messages": 0.0,
        "workspace": max(beside, _logits(job, layout)),
    }
