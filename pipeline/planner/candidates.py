"""All layouts of a job that divide: meshes, schedules, V, microbatches, remat, shards of weights.

Letters: S, D, E, R, T ranks on `stage`, `data`, `expert`, `context`, `tensor`; V stages on a rank,
M microbatches, N slices of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeline.planner.experts import Dispatched, capacity_for
from pipeline.planner.layout import (
    BUT_ATTENTION,
    GATHERED,
    MLP,
    OF_PIPELINES,
    MeshLayout,
    PlannedJob,
)
from pipeline.planner.makespan import built, places
from pipeline.planner.memory import COPIES, fits, pipeline_bytes, stash_bytes, usable
from pipeline.planner.sequences import SequenceCut, cuts_of, shares_heads
from schedules import ScheduleError, names
from schedules.build import options, takes_slices
from schedules.families import SLICED

# All that are the same for all costs: those made to measure take longer than a plan may.
SCHEDULES = tuple(name for name in names() if not options(name))
REMAT = (None, GATHERED, "block", BUT_ATTENTION, MLP, "stage")
# V that are tried, of families that can: these, and all up to the most that share layers evenly.
CHUNKS, MOST_CHUNKS = (1, 2, 4, 8), 10
ROWS = (1, 2, 4, 8)  # sequences of a pipeline's microbatch
MOST_TENSOR = 16
# R and N that are tried where the job does not say it, and the fewest positions of a part.
CONTEXT_SIZES = SLICES = (1, 2, 4, 8, 16, 32)
FEWEST = 1024
MOST_IDLE = 0.1  # of stages with a layer less than the longest


def layouts_of(
    job: PlannedJob,
    schedules: Sequence[str],
    remat: Sequence[str | None],
    faults: dict[str, list[int]],
) -> Iterator[MeshLayout]:
    """Everything that divides; rules that leave out a size are noted in ``faults`` with it."""
    each = job.devices // job.slices
    for D, E, R, S, T in _meshes(job, faults):
        for stages in divisors(math.gcd(S, job.slices)):
            slices = job.slices // stages
            if D % slices or (D // slices) * E * R * (S // stages) * T != each:
                continue
            base = MeshLayout(D, S, T, slices, stages, experts=Dispatched(E))
            for cut in _cuts(job, R, S, T, faults):
                one = replace(base, cut=cut)
                yield from _alone(job, one, remat) if S == 1 else _piped(job, one, schedules, remat)


def _cuts(
    job: PlannedJob, R: int, S: int, T: int, faults: dict[str, list[int]]
) -> list[SequenceCut]:
    """Ways to cut sequences on a mesh; those that cannot be are noted with their rule."""
    tried = job.num_slices or tuple(N for N in SLICES if N == 1 or job.seq // (R * N) >= FEWEST)
    if S == 1:
        tried = tuple(N for N in tried if N == 1)
    if R > 1 and not shares_heads(job.model, R, T):
        heads = f"{job.model.heads} heads of queries and {job.model.kv_heads} of keys"
        note(faults, f"context: Ulysses is not tried where ranks cannot share {heads}", R)
    if R > 1 and job.seq % (2 * R * T):
        rule = f"a ring in zig-zag order needs twice the ranks to divide {job.seq} positions"
        note(faults, f"context: {rule}", R)
    return cuts_of(job.model, job.seq, R, tried, T)


def note(faults: dict[str, list[int]], rule: str, size: int) -> None:
    """Note a size that a rule leaves out, once."""
    sizes = faults.setdefault(rule, [])
    if size not in sizes:
        sizes.append(size)


def _meshes(
    job: PlannedJob, faults: dict[str, list[int]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """D, E, R, S, T that model and batch can share; others are noted with their rule."""
    model, each = job.model, job.devices // job.slices

    refuse = functools.partial(note, faults)
    for T in divisors(each):
        if T > MOST_TENSOR:
            break
        if model.experts is not None and T > 1:
            refuse("tensor: experts are not cut over it, so each of its ranks would compute all", T)
            continue
        if model.kv_heads % T or model.hidden % T or job.seq % T:
            refuse(f"tensor: must divide {model.kv_heads} heads of keys, columns, positions", T)
            continue
        for S in divisors(job.devices // T):
            if not _share(model.layers, S):
                refuse(f"stage: cannot share {model.layers} layers with less than 10% idle", S)
                continue
            for R in _context_ranks(job, math.gcd(job.devices // (S * T), each)):
                rest = job.devices // (S * T * R)
                if job.batch % rest:
                    refuse(f"data: must divide the batch of {job.batch}", rest)
                    continue
                for E in _expert_ranks(job, math.gcd(rest, each // R)):
                    yield rest // E, E, R, S, T


def _context_ranks(job: PlannedJob, ranks: int) -> list[int]:
    """List R that are tried and divide the ranks and the positions."""
    tried = job.context or [R for R in CONTEXT_SIZES if R == 1 or job.seq // R >= FEWEST]
    return [R for R in divisors(math.gcd(ranks, job.seq)) if R in tried]


def _expert_ranks(job: PlannedJob, ranks: int) -> list[int]:
    """List E that divide the number of experts and the ranks."""
    experts = job.model.experts
    return [1] if experts is None else divisors(math.gcd(experts.number, ranks))


def _ways(job: PlannedJob, experts: Dispatched, tokens: int) -> list[Dispatched]:
    """All dispatches of a rank's tokens; one where there is one rank, none if parts are uneven."""
    if job.model.experts is None:
        return [experts]
    at_once = min(tokens, job.chunk or tokens)
    if tokens % at_once:
        return []
    experts = replace(experts, part=at_once / tokens)
    if experts.ranks == 1:
        return [experts]
    factor = capacity_for(job.model.experts, at_once, job.imbalance)
    return [
        replace(experts, way=way, capacity=factor if way == "capacity" else 1.0)
        for way in job.dispatch
    ]


def _alone(job: PlannedJob, base: MeshLayout, remat: Sequence[str | None]) -> Iterator[MeshLayout]:
    each = job.batch // base.rows_ranks
    ways = ["replicated"]
    if base.rows_ranks > 1:
        ways = ["zero1", "fsdp", "hsdp"][: 3 if 1 < base.data_slices < base.data else 2]
    # All of it is one stage, and what is gathered again is the compiler's choice.
    kept = _but(remat, OF_PIPELINES)
    for rows, way, again in itertools.product(divisors(each), ways, kept):
        for experts in _ways(job, base.experts, rows * job.seq // base.cut.parts):
            yield replace(
                base,
                microbatches=each // rows,
                rows=rows,
                data_parallel=way,
                remat=again,
                experts=experts,
            )


def _but(remat: Sequence[str | None], others: Sequence[str]) -> Sequence[str | None]:
    """List remat policies other than the given ones; empty if there are no others."""
    return [one for one in remat if one not in others] or [None]


def _piped(
    job: PlannedJob, base: MeshLayout, schedules: Sequence[str], remat: Sequence[str | None]
) -> Iterator[MeshLayout]:
    S, each = base.stage, job.batch // base.rows_ranks
    ways = ["replicated"] if base.rows_ranks == 1 else ["zero1", "fsdp", "windows"]
    kept = _but(remat, (GATHERED,)) if base.tensor == 1 else remat
    sliced, N = sliced_of(schedules), base.cut.slices
    if N > 1:  # stages compute themselves again, not their blocks
        kept = [one for one in kept if one not in ("block", BUT_ATTENTION, MLP)]
    elif not base.cut.by_kernel:
        kept = _but(kept, (BUT_ATTENTION, MLP))
    named = sliced if N > 1 else [one for one in schedules if not takes_slices(one)]
    for name, rows in itertools.product(named, ROWS):
        if each % rows:
            continue
        tokens = rows * job.seq // base.cut.parts
        for V in _chunks(job.model.layers, S) if N == 1 else (1,):
            M = each // rows
            if not _share(job.model.layers, S * V) or not _can(name, S, V, M, N):
                continue
            dispatched = _ways(job, base.experts, tokens)
            every = itertools.product(kept, ways, ("ends", "stage"), dispatched)
            for again, way, word, experts in every:
                if way == "windows" and V == 1:  # one chunk is there all the time
                    continue
                yield replace(
                    base,
                    schedule=name,
                    chunks=V,
                    microbatches=M,
                    rows=rows,
                    remat=again,
                    data_parallel=way,
                    vocabulary=word,
                    experts=experts,
                )


def sliced_of(schedules: Sequence[str]) -> list[str]:
    """List the families for slices: those that are named, or all where none is."""
    return [one for one in schedules if takes_slices(one)] or list(SLICED)


def _chunks(layers: int, ranks: int) -> list[int]:
    """V that are tried."""
    return [V for V in range(1, MOST_CHUNKS + 1) if V in CHUNKS or layers % (ranks * V) == 0]


def _share(layers: int, stages: int) -> bool:
    """Tell whether every stage has a layer, and none waits long for stages with one more."""
    return stages <= layers and -(-layers // stages) * stages * (1 - MOST_IDLE) <= layers


@functools.lru_cache(maxsize=8192)
def _can(name: str, S: int, V: int, M: int, N: int) -> bool:
    """Tell whether a family has a schedule of these sizes; what S divides is as good as M = 8 S."""
    try:
        built(name, S, V, min(M, 8 * S + M % S), N)
    except ScheduleError:
        return False
    return True


def with_offload(job: PlannedJob, layouts: Iterable[MeshLayout]) -> Iterator[MeshLayout]:
    """Use host memory for each layout that does not fit without.

    Of a pipeline either the smallest share of stashes lies there that fits, or the optimizer's
    state and, if that is not enough, the smallest share beside it. Of a layout without a pipeline
    all that its blocks keep beside their MLP.
    """
    room = usable(job)
    for layout in layouts:
        if layout.schedule is None:
            if layout.remat == MLP and not fits(job, layout):
                offloaded = replace(layout, offload=1.0)
                if fits(job, offloaded):
                    yield offloaded
            continue
        if sum(pipeline_bytes(job, layout).values()) <= room:
            continue
        for one in (layout, replace(layout, host_optimizer=True)):
            found = _with_stashes(job, one, room)
            if found is not None:
                yield found


def _with_stashes(job: PlannedJob, layout: MeshLayout, room: float) -> MeshLayout | None:
    """Offload the smallest share of stashes that fits; None if none does.

    P is the most stashes that a rank holds at once. Stashes of slices stay: a pipeline refuses
    both. Where the optimizer's state fills the chip during the update, no share helps.
    """
    held = pipeline_bytes(job, layout)
    over = sum(held.values()) - room
    if over <= 0:
        return layout
    if layout.cut.slices > 1 or (layout.host_optimizer and held["optimizer"]):
        return None
    P, _ = places(layout.schedule or "", layout.stage, layout.chunks, layout.microbatches)
    moved = math.ceil(over / stash_bytes(job, layout) + COPIES)
    if moved > P:
        return None
    found = replace(layout, offload=min(1.0, math.ceil(1e4 * moved / P) / 1e4))
    return found if sum(pipeline_bytes(job, found).values()) <= room else None


def divisors(number: int) -> list[int]:
    """List all of a number, which may be huge, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
