"""All layouts of a job that divide: meshes, schedules, V, microbatches, remat, shards of weights.

Letters: S, D, E, T ranks on `stage`, `data`, `expert`, `tensor`; V stages on a rank, M
microbatches.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeline.planner.experts import Dispatched, capacity_for
from pipeline.planner.layout import BUT_ATTENTION, GATHERED, OF_PIPELINES, MeshLayout, PlannedJob
from pipeline.planner.makespan import built
from schedules import ScheduleError, names
from schedules.build import options

# All that are the same for all costs: those made to measure take longer than a plan may.
SCHEDULES = tuple(name for name in names() if not options(name))
REMAT = (None, GATHERED, "block", BUT_ATTENTION, "stage")
# V that are tried, of families that can: these, and all up to the most that share layers evenly.
CHUNKS, MOST_CHUNKS = (1, 2, 4, 8), 10
ROWS = (1, 2, 4, 8)  # sequences of a pipeline's microbatch
MOST_TENSOR = 16
MOST_IDLE = 0.1  # of stages with a layer less than the longest


def layouts_of(
    job: PlannedJob,
    schedules: Sequence[str],
    remat: Sequence[str | None],
    faults: dict[str, list[int]],
) -> Iterator[MeshLayout]:
    """Everything that divides; rules that leave out a size are noted in ``faults`` with it."""
    each = job.devices // job.slices
    for D, E, S, T in _meshes(job, faults):
        for stages in divisors(math.gcd(S, job.slices)):
            slices = job.slices // stages
            if D % slices or (D // slices) * E * (S // stages) * T != each:
                continue
            base = MeshLayout(D, S, T, slices, stages, experts=Dispatched(E))
            yield from _alone(job, base, remat) if S == 1 else _piped(job, base, schedules, remat)


def _meshes(job: PlannedJob, faults: dict[str, list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """D, E, S, T that the model and the batch can share; others are noted with their rule."""
    model, each = job.model, job.devices // job.slices

    def refuse(rule: str, size: int) -> None:
        sizes = faults.setdefault(rule, [])
        if size not in sizes:
            sizes.append(size)

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
            rest = job.devices // (S * T)
            if not _share(model.layers, S):
                refuse(f"stage: cannot share {model.layers} layers with less than 10% idle", S)
            elif job.batch % rest:
                refuse(f"data: must divide the batch of {job.batch}", rest)
            else:
                for E in _expert_ranks(job, math.gcd(rest, each)):
                    yield rest // E, E, S, T


def _expert_ranks(job: PlannedJob, ranks: int) -> list[int]:
    """List E that divide the number of experts and the ranks."""
    experts = job.model.experts
    return [1] if experts is None else divisors(math.gcd(experts.number, ranks))


def _ways(job: PlannedJob, experts: Dispatched, rows: int) -> list[Dispatched]:
    """All dispatches over so many ranks; they are one where there is one rank."""
    if experts.ranks == 1 or job.model.experts is None:
        return [experts]
    factor = capacity_for(job.model.experts, rows * job.seq, job.imbalance)
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
        for experts in _ways(job, base.experts, rows):
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
    ways = ["replicated"] if base.rows_ranks == 1 else ["zero1", "fsdp"]
    kept = _but(remat, (GATHERED,)) if base.tensor == 1 else remat
    for name, rows in itertools.product(schedules, ROWS):
        if each % rows:
            continue
        for V in _chunks(job.model.layers, S):
            M = each // rows
            if not _share(job.model.layers, S * V) or not _can(name, S, V, M):
                continue
            every = itertools.product(kept, ways, ("ends", "stage"), _ways(job, base.experts, rows))
            for again, way, word, experts in every:
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


def _chunks(layers: int, ranks: int) -> list[int]:
    """V that are tried."""
    return [V for V in range(1, MOST_CHUNKS + 1) if V in CHUNKS or layers % (ranks * V) == 0]


def _share(layers: int, stages: int) -> bool:
    """Tell whether every stage has a layer, and none waits long for stages with one more."""
    return stages <= layers and -(-layers // stages) * stages * (1 - MOST_IDLE) <= layers


@functools.lru_cache(maxsize=8192)
def _can(name: str, S: int, V: int, M: int) -> bool:
    """Tell whether a family has a schedule of these sizes; what S divides is as good as M = 8 S."""
    try:
        built(name, S, V, min(M, 8 * S + M % S))
    except ScheduleError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """List all of a number, which may be huge, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
