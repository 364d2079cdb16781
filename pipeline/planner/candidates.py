"""All layouts of a job whose sizes divide: meshes, schedules, V, microbatches, remat, sharding.

`pipeline.planner.layout` lists the letters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeline.planner.clock import built, places
from pipeline.planner.layout import (
    BUT_ATTENTION,
    GATHERED,
    MLP,
    Dispatched,
    MeshLayout,
    PlannedJob,
)
from pipeline.planner.memory import COPIES, bytes_of, fullness, stash_bytes, usable
from pipeline.planner.models import ExpertSizes, ModelSizes
from schedules import ScheduleError, names
from schedules.build import options, split_names
from schedules.families import GROUPED

# Families whose orders do not depend on costs: the search of other orders takes too long here.
SCHEDULES = tuple(name for name in names() if not options(name))
REMAT = (None, GATHERED, "block", BUT_ATTENTION, MLP, "stage")
# V to try: those in CHUNKS, and up to MOST_CHUNKS all that divide the layers evenly.
CHUNKS, MOST_CHUNKS = (1, 2, 4, 8), 10
ROWS = (1, 2, 4, 8)  # sequences in a pipeline's microbatch
MOST_TENSOR = 16
MOST_IDLE = 0.1  # share of idle layers, if stages have a layer less than the longest stage
# Room of "capacity": the tokens of an expert are Poisson distributed. The room is the mean of the
# busiest expert plus DEVIATIONS standard deviations (1 in 700 has more), rounded up to a STEP.
DEVIATIONS, STEP = 3.0, 0.05

Faults = dict[str, list[int]]  # excluded sizes, by rule ("axis: rule")


def layouts_of(
    job: PlannedJob, schedules: Sequence[str], remat: Sequence[str | None], faults: Faults
) -> Iterator[MeshLayout]:
    """List all layouts whose sizes divide; ``faults`` gets the rules that exclude a size."""
    for D, E, R, S, T in _meshes(job, faults):
        for stages in divisors(math.gcd(S, job.slices)):
            slices = job.slices // stages
            if D % slices == 0:
                base = MeshLayout(D, S, T, slices, stages, experts=Dispatched(E), context=R)
                yield from _spread(job, base, schedules if S > 1 else [], remat)


def _meshes(job: PlannedJob, faults: Faults) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield D, E, R, S, T that divide model and batch; record other sizes with the rule."""
    model, each = job.model, job.devices // job.slices
    heads = f"{model.heads} heads of queries and {model.kv_heads} of keys"
    number = 1 if model.experts is None else model.experts.number
    for T in divisors(each):
        if T > MOST_TENSOR:
            break
        if number > 1 and T > 1:
            rule = "tensor: experts are not cut over it, so each of its ranks would compute all"
            note(faults, rule, T)
            continue
        if model.kv_heads % T or model.hidden % T or job.seq % T:
            rule = f"tensor: must divide {model.kv_heads} heads of keys, columns, positions"
            note(faults, rule, T)
            continue
        for S, R in itertools.product(divisors(job.devices // T), job.context):
            rest, odd = divmod(job.devices, S * R * T)
            if odd or each % (R * T) or job.seq % (R * T):
                continue
            if not _share(model.layers, S):
                rule = f"stage: cannot share {model.layers} layers with less than 10% idle"
                note(faults, rule, S)
            elif R > 1 and not shares_heads(model, R, T):
                note(faults, f"context: Ulysses needs ranks that can share {heads}", R)
            elif job.batch % rest:
                note(faults, f"data: must divide the batch of {job.batch}", rest)
            else:
                for E in divisors(math.gcd(number, rest, each // R)):
                    yield rest // E, E, R, S, T


def note(faults: Faults, rule: str, size: int) -> None:
    sizes = faults.setdefault(rule, [])
    if size not in sizes:
        sizes.append(size)


def shares_heads(model: ModelSizes, ranks: int, tensor: int) -> bool:
    """Tell whether Ulysses can divide the heads equally between the ranks."""
    heads, kv_heads = model.heads // tensor, model.kv_heads // tensor
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _share(layers: int, stages: int) -> bool:
    """Tell whether every stage has a layer, and at most `MOST_IDLE` of the stages' work is idle."""
    return stages <= layers and -(-layers // stages) * stages * (1 - MOST_IDLE) <= layers


def _spread(
    job: PlannedJob, base: MeshLayout, schedules: Sequence[str], remat: Sequence[str | None]
) -> Iterator[MeshLayout]:
    """List all layouts of a mesh; without schedules, the layouts without a pipeline."""
    each, piped = job.batch // base.rows_ranks, base.stage > 1
    ways = ["replicated"]
    if base.rows_ranks > 1:
        crosses = 1 < base.data_slices < base.data
        # Gathering weights in each action takes more memory and traffic than windows.
        ways = ["zero1", "windows"] if piped else ["zero1", "fsdp", *["hsdp"] * crosses]
    # Without a pipeline all is one stage, and the compiler decides what to gather again.
    gathers = [GATHERED] * (base.tensor == 1)
    others = gathers if piped else [GATHERED, "stage"]
    kept = [policy for policy in remat if policy not in others] or [None]
    words = ("ends", "stage") if piped else ("ends",)
    for rows in ROWS if piped else divisors(each):
        if each % rows:
            continue
        one = replace(base, rows=rows, microbatches=each // rows)
        dispatched = _dispatches(job, base.experts, rows * job.seq // base.context)
        for order in _orders(job, one, schedules):
            for again, way, word, experts in itertools.product(kept, ways, words, dispatched):
                if way == "windows" and order.chunks == 1:  # one chunk is always gathered
                    continue
                found = replace(order, remat=again, data_parallel=way, vocabulary=word)
                yield replace(found, experts=experts)


def _orders(job: PlannedJob, one: MeshLayout, schedules: Sequence[str]) -> Iterator[MeshLayout]:
    """Yield a layout with each schedule and V; without a pipeline, the layout itself."""
    S, M, layers = one.stage, one.microbatches, job.model.layers
    if S == 1:
        yield one
        return
    chunks = [V for V in range(1, MOST_CHUNKS + 1) if V in CHUNKS or layers % (S * V) == 0]
    for name, V in itertools.product(schedules, chunks):
        if _share(layers, S * V) and _can(name, S, V, M):
            yield replace(one, schedule=name, chunks=V)


@functools.lru_cache(maxsize=8192)
def _can(name: str, S: int, V: int, M: int) -> bool:
    """Tell whether a family has a schedule of these sizes; large M is tested as 8 S + M % S."""
    try:
        built((name, S, V, min(M, 8 * S + M % S)))
    except ScheduleError:
        return False
    return True


def _dispatches(job: PlannedJob, experts: Dispatched, tokens: int) -> list[Dispatched]:
    if job.model.experts is None:
        return [experts]
    if experts.ranks == 1:
        return [experts]
    factor = {"capacity": capacity_for(job.model.experts, tokens, job.imbalance)}
    return [replace(experts, way=way, capacity=factor.get(way, 1.0)) for way in job.dispatch]


def capacity_for(experts: ExpertSizes, tokens: int, imbalance: float) -> float:
    """Return the capacity factor with which the busiest expert of a rank drops almost no tokens."""
    mean = tokens * experts.top_k / experts.number
    needed = imbalance + DEVIATIONS * math.sqrt(imbalance / mean)
    return min(math.ceil(needed / STEP - 1e-9) * STEP, experts.number / experts.top_k)


def with_groups(job: PlannedJob, layouts: Iterable[MeshLayout]) -> Iterator[MeshLayout]:
    """Give rounds of 3/4 or 1/2 S microbatches to each layout with rounds that does not fit.

    This is done only for families that split backwards into I and W: in lockstep, small rounds of
    whole backwards take far longer.
    """
    families = {*GROUPED} & {*split_names()}
    for layout in layouts:
        S = layout.stage
        if layout.schedule in families and fullness(job, layout) > 1:
            smaller = (replace(layout, group=size) for size in (3 * S // 4, (S + 1) // 2))
            yield from itertools.islice((one for one in smaller if fullness(job, one) <= 1), 1)


def with_offload(job: PlannedJob, layouts: Iterable[MeshLayout]) -> Iterator[MeshLayout]:
    """Use host memory for each layout that does not fit without it.

    A pipeline moves the smallest share of its stashes with which it fits; or it moves the
    optimizer's state and, if that is not enough, a share of stashes too. Without a pipeline all
    values move that blocks keep if their MLPs are recomputed.
    """
    for layout in layouts:
        if layout.schedule is None:
            found = replace(layout, offload=1.0)
            if layout.remat == MLP and fullness(job, layout) > 1 >= fullness(job, found):
                yield found
        elif sum(bytes_of(job, layout).values()) > usable(job):
            for one in (layout, replace(layout, host_optimizer=True)):
                yield from _with_stashes(job, one)


def _with_stashes(job: PlannedJob, layout: MeshLayout) -> Iterator[MeshLayout]:
    """Offload the smallest share of stashes that fits, if any share fits.

    If the optimizer's state fills the chip during the update, no share helps.
    """
    held = bytes_of(job, layout)
    over = sum(held.values()) - usable(job)
    if over <= 0:
        yield layout
    elif not (layout.host_optimizer and held["optimizer"]):
        most, _ = places(layout.order)
        moved = math.ceil(over / stash_bytes(job, layout) + COPIES)
        found = replace(layout, offload=min(1.0, math.ceil(1e4 * moved / most) / 1e4))
        if moved <= most and sum(bytes_of(job, found).values()) <= usable(job):
            yield found


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, which may be huge, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
