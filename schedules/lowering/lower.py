"""Lowering of a schedule to a program: choose the slots of a tick, give every value a place.

C is the number of channels of a slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from schedules.clocks.hosted import Keep, Offload, check_keep, check_offload, hosted, moves
from schedules.clocks.lockstep import fastest
from schedules.clocks.shared import Shared, Together, parts, together
from schedules.clocks.ticks import Ticks
from schedules.core.action import KINDS
from schedules.core.arguments import need
from schedules.core.check import check
from schedules.core.costs import Costs, of_unit_length_by_default
from schedules.core.flat import Ints, flatten
from schedules.core.schedule import Schedule
from schedules.lowering.kinds import HOSTABLE
from schedules.lowering.places import Values, joined, place, values
from schedules.lowering.program import JOBS, Channel, Job, Op, Placement, Program, Slot, Table
from schedules.lowering.windows import Windows, windows


def lower(
    schedule: Schedule,
    *,
    keep: Keep = "input",
    pattern: str | None = None,
    costs: Costs | None = None,
    partners: bool = False,
    delayed: bool | None = False,
    shared: Iterable[str] = (),
    offload: Offload = None,
    gathers: bool = False,
) -> Program:
    """Compile a schedule to a program; the order of each rank's actions stays.

    Args:
      schedule: a legal schedule.
      keep: the values that F keeps for its backward: the stage's input or its residuals.
      pattern: the slots of a tick: "single" (one action of any kind), "paired" (an F slot, then a
        backward slot), "unit" (F, then B or I, then W) or "partner" (two slots; in each, F runs on
        the ranks of one parity and backwards on the others, so that classic 1F1B exchanges between
        disjoint pairs); by default the pattern with the smallest lockstep makespan.
      costs: durations for the choice of the pattern; by default F = I = W.
      partners: for the choice of the pattern, whether an exchange synchronizes only its sender and
        receiver, not all ranks.
      delayed: whether a message to another rank is sent during the work of the next slot, and can
        be used from the slot after that. The exchange then costs only its time beyond this work.
        None takes the choice with the smaller makespan.
      shared: the parts of "embed" and "head" that all ranks share, split by vocabulary.
      offload: the values that are in host memory between two actions: "stash", "crossings", or a
        share of the stashes from 0 to 1, where the longest held are chosen first
        (`schedules.clocks.hosted`). If ``costs`` have a `host` time, the choice of slots includes
        the copies.
      gathers: whether weights are sharded over several devices. The weights of a chunk are gathered
        into a window when a rank begins the chunk, and its gradients are reduced when the rank
        leaves the chunk (`schedules.lowering.windows`).

    Raises:
      ScheduleError: unknown keep, pattern, shared or offload, or an illegal schedule.
    """
    need("partners", partners, bool, "give True or False")
    need("gathers", gathers, bool, "give True or False")
    keep, offload = check_keep(keep), check_offload(offload)
    check(schedule)
    # Copies to host memory take time, so the choice of slots includes them.
    costs, shared = of_unit_length_by_default(costs), parts(shared)
    copies = moves(schedule, keep, offload, shared)
    sends: dict[str, Any] = {"partners": partners, "delayed": delayed}
    best = fastest(schedule, pattern, costs, **sends, shared=shared, copies=copies)
    return allocate(best.ticks, keep, shared, offload, windows(schedule) if gathers else None)


def allocate(
    ticks: Ticks,
    keep: Keep,
    shared: Shared = (),
    offload: Offload = None,
    chunk_windows: Windows | None = None,
) -> Program:
    """Give every value of a layout its place, and write the tables.

    Without ``chunk_windows`` each rank always has the whole weights of its chunks.
    """
    schedule, flat, width = ticks.schedule, flatten(ticks.schedule), ticks.width
    count, num_ranks = ticks.num_ticks * width, schedule.num_ranks
    live = values(ticks, keep, shared, hosted(schedule, keep, offload, shared))
    places = place(live, num_ranks)

    def table(rows: Table) -> Table:
        return rows.reshape(ticks.num_ticks, width, *rows.shape[1:])

    # The places in which actions find the values of each kind.
    placements: dict[str, Placement] = {}
    for kind, of in live.items():
        number, device, host = places[kind]
        columns = schedule.num_slices if kind.per_slice else 1
        rows = np.full((count, num_ranks, columns), device + host, np.int32)
        for times in of.touched:
            does = times >= 0
            rows[times[does], of.rank[does], of.column[does]] = number[does]
        rows = rows if kind.per_slice else rows[..., 0]
        placements[kind.name] = Placement(table(rows), device, host)

    # The places in which channels store messages; values that all ranks make together are not sent.
    kinds = [kind for kind in live if not kind.writes]
    messages = joined(live[kind] for kind in kinds)
    arrives = messages.source >= 0
    messages = messages.chosen(arrives)
    channels, channel = _channels(ticks, messages)
    discard = placements["operand"].discard
    arrival = np.full((count, num_ranks, max(map(len, channels))), discard, np.int32)
    number = np.concatenate([places[kind].of for kind in kinds])[arrives]
    arrival[messages.born, messages.rank, channel] = number

    # The actions that run.
    ops, branches = _ops(ticks, shared, placements, chunk_windows)
    op, microbatch = np.zeros((2, count, num_ranks), np.int32)
    op[ticks.times, flat.rank] = branches
    microbatch[ticks.times, flat.rank] = flat.microbatch
    common = together(schedule, ticks.times, count, shared)
    return Program(
        schedule=schedule,
        keep=keep,
        slots=tuple(Slot(*slot) for slot in zip(ticks.kinds, ops, channels, strict=True)),
        op=table(op),
        microbatch=table(microbatch),
        arrival=table(arrival),
        values=placements,
        common=Together(*map(table, common)),
        delayed=ticks.delayed,
        windows=chunk_windows,
    )


def _ops(
    ticks: Ticks,
    shared: Shared,
    placements: dict[str, Placement],
    chunk_windows: Windows | None,
) -> tuple[list[tuple[Op, ...]], Ints]:
    """Return the ops of each slot, sorted by their fields, and [A] the branch of each action."""
    # Each field of `Op` as a number from 0, [A]: the kind; the chunk and ends of the stage;
    schedule, flat = ticks.schedule, flatten(ticks.schedule)
    first = -1 if "embed" in shared else 0
    last = -1 if "head" in shared else schedule.num_stages - 1
    stages = [(chunk, k == first, k == last) for k, chunk in enumerate(schedule.chunk_of)]
    kinds = sorted(set(stages))
    slot, num_chunks = ticks.times % ticks.width, schedule.num_stages // schedule.num_ranks
    columns = [slot, flat.kind, np.array([kinds.index(s) for s in stages])[flat.stage]]
    sizes = [ticks.width, len(KINDS), len(kinds)]
    # the values in host memory;
    for name in HOSTABLE:
        rows, device, host = placements[name]
        numbers = rows.reshape(-1, schedule.num_ranks)[ticks.times, flat.rank]
        columns.append((numbers >= device) & (numbers < device + host))
        sizes.append(2)
    # the jobs.
    jobs = () if chunk_windows is None else (chunk_windows.gathers, chunk_windows.reduces)
    columns += [chunks + 1 for chunks in jobs]
    sizes += [num_chunks + 1 for _ in jobs]

    # Actions with equal fields share an op. Ops are sorted by their fields, so a schedule that is
    # lowered again has the same numbers and hits the compilation cache.
    code, number = np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)
    fields = np.stack(np.unravel_index(code, sizes), axis=1)
    ops: list[list[Op]] = [[] for _ in range(ticks.width)]
    for n, kind, stage, *rest in fields.tolist():
        host_names = tuple(name for name, is_there in zip(HOSTABLE, rest, strict=False) if is_there)
        chunks = zip(JOBS, rest[len(HOSTABLE) :], strict=False)
        beside = tuple(Job(name, chunk - 1) for name, chunk in chunks if chunk > 0)
        chunk, is_first, is_last = kinds[stage]
        ops[n].append(Op(KINDS[kind], chunk, is_first, is_last, host_names, beside))
    before = np.searchsorted(fields[:, 0], np.arange(ticks.width))
    return [tuple(of_slot) for of_slot in ops], number - before[slot] + 1


def _channels(ticks: Ticks, messages: Values) -> tuple[list[tuple[Channel, ...]], Ints]:
    """Return the static permutations of each slot, and [n] the channel that brings each message."""
    # The messages of one slot and one shift form a permutation, because a rank sends at most one
    # result.
    num_ranks = ticks.schedule.num_ranks
    slot = messages.born % ticks.width
    shift = (messages.rank - messages.source) % num_ranks
    codes = np.unique((slot * num_ranks + shift) * num_ranks + messages.source)
    edges: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(ticks.width)]
    for code in codes.tolist():
        rest, source = divmod(code, num_ranks)
        s, d = divmod(rest, num_ranks)
        edges[s].setdefault(d, []).append((source, (source + d) % num_ranks))
    channel = np.zeros((ticks.width, num_ranks), np.int64)
    for s, shifts in enumerate(edges):
        channel[s, list(shifts)] = range(len(shifts))
    channels = [tuple(Channel(d, tuple(pairs)) for d, pairs in of.items()) for of in edges]
    return channels, channel[slot, shift]
