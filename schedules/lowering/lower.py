"""From a schedule to a program: choose the slots of a tick, give every value a place.

Letters as in `schedules.core.action`, A as in `schedules.core.flat`, C as in
`schedules.lowering.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from schedules.checks.check import check
from schedules.clocks.hosted import Keep, Offload, check_keep, check_offload, hosted, moves
from schedules.clocks.lockstep import fastest
from schedules.clocks.shared import Shared, parts, together
from schedules.clocks.ticks import Ticks
from schedules.clocks.windows import Windows, windows
from schedules.core.action import KINDS
from schedules.core.arguments import need
from schedules.core.costs import Costs, of_unit_length_by_default
from schedules.core.flat import Ints, Mask, flatten
from schedules.lowering.carries import carried
from schedules.lowering.offload import move_to_host
from schedules.lowering.places import Values, colour, values
from schedules.lowering.program import Channel, Op, Program, Slot, Table
from schedules.orders.schedule import Schedule


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
    """Compile a schedule; no rank's order changes.

    Args:
      schedule: a legal schedule.
      keep: what F leaves for its backward, the stage's input or its residuals.
      pattern: the slots of a tick: "single" (one action of any kind), "paired" (an F slot, then
        a backward slot), "unit" (F, then B or I, then W) or "partner" (two slots; ranks of one
        parity run F while those of the other run backwards, so that classic 1F1B exchanges
        between disjoint pairs); by default the one with the smallest lockstep makespan.
      costs: durations for that choice; by default F = I = W.
      partners: exchanges make only those ranks meet that they join, not all; for that choice.
      delayed: a message to another rank travels beside the work of the slot after its own and can
        be used from the slot after that, so that an exchange costs only what is longer than that
        work; None for what has the smaller makespan.
      shared: which of "embed" and "head" all ranks share, split by vocabulary.
      offload: what lies in host memory between two actions: "stash", "crossings", or a share of the
        stashes from 0 to 1, those that are held longest (`schedules.clocks.hosted`). Where
        ``costs`` have a `host` time, the choice of slots counts what moves.
      gathers: weights lie in parts on several devices; a chunk's are gathered into a window when a
        rank comes to it, and its gradients shared out when the rank leaves it
        (`schedules.clocks.windows`).

    Raises:
      ScheduleError: unknown keep, pattern, shared or offload, or an illegal schedule.
    """
    need("partners", partners, bool, "give True or False")
    need("gathers", gathers, bool, "give True or False")
    keep, offload = check_keep(keep), check_offload(offload)
    check(schedule)
    costs, shared = of_unit_length_by_default(costs), parts(shared)
    copies = moves(schedule, keep, offload, shared)
    sends: dict[str, Any] = {"partners": partners, "delayed": delayed}
    best = fastest(schedule, pattern, costs, **sends, shared=shared, copies=copies)
    into = windows(schedule) if gathers else None
    return allocate(best.ticks, keep, shared, offload, into)


def allocate(
    ticks: Ticks,
    keep: Keep,
    shared: Shared = (),
    offload: Offload = None,
    into: Windows | None = None,
) -> Program:
    """Give every value of a layout its place and write the tables.

    Args:
      ticks: the layout.
      keep: as of `lower`.
      shared: as of `lower`.
      offload: as of `lower`.
      into: windows of weights and gradients, if ranks do not have them whole all the time.
    """
    schedule, flat, width = ticks.schedule, flatten(ticks.schedule), ticks.width
    held = values(ticks, keep, shared)
    on_host = move_to_host(ticks, held, keep, hosted(schedule, keep, offload, shared))
    both = zip(held["operand"], held["gradient"], strict=True)
    messages = Values(*(np.concatenate(pair, axis=-1) for pair in both))
    num_ranks = schedule.num_ranks
    num_buffers, buffers = colour(messages.rank, messages.born, messages.read, num_ranks)
    (num_stashes, num_host_stashes), stashes = _colour(held, on_host, "stash", num_ranks)
    (num_crossings, num_host_crossings), crossings = _colour(held, on_host, "crossing", num_ranks)
    none = np.full(len(flat.kind), -1, np.int64)
    moved = (none, none) if into is None else (into.gathers, into.reduces)
    ops, branch = _ops(ticks, shared, held, on_host, moved)
    arrives = np.ones(len(buffers), bool)
    arrives[: schedule.num_units] = "embed" not in shared  # nobody sends those
    arriving = Values(*(column[..., arrives] for column in messages))
    channels, channel = _channels(ticks, arriving)

    shape = (ticks.num_ticks * width, num_ranks)
    num_channels = max(map(len, channels))
    table: dict[str, Table] = {
        "op": np.zeros(shape, np.int32),
        "microbatch": np.zeros(shape, np.int32),
        "operand": np.full(shape, num_buffers, np.int32),
        "gradient": np.full(shape, num_buffers, np.int32),
        "stash": np.full(shape, num_stashes + num_host_stashes, np.int32),
        "crossing": np.full(shape, num_crossings + num_host_crossings, np.int32),
        "arrival": np.full((*shape, num_channels), num_buffers, np.int32),
    }
    table["op"][ticks.times, flat.rank] = branch
    table["microbatch"][ticks.times, flat.rank] = flat.microbatch
    table["arrival"][arriving.born, arriving.rank, channel] = buffers[arrives]
    start = len(held["operand"].rank)
    places = {
        "operand": buffers[:start],
        "gradient": buffers[start:],
        "stash": stashes,
        "crossing": crossings,
    }
    for column, place in places.items():
        for times in held[column].touched:
            does = times >= 0
            table[column][times[does], held[column].rank[does]] = place[does]
    for name, work in together(schedule, ticks.times, shape[0], shared)._asdict().items():
        table[name] = work.astype(np.int32)
    slots = zip(ticks.kinds, ops, channels, strict=True)
    tables: dict[str, Any] = {
        name: t.reshape(ticks.num_ticks, width, *t.shape[1:]) for name, t in table.items()
    }
    return Program(
        schedule=schedule,
        keep=keep,
        slots=tuple(Slot(*slot) for slot in slots),
        num_buffers=num_buffers,
        num_stashes=num_stashes,
        num_crossings=num_crossings,
        delayed=ticks.delayed,
        num_host_stashes=num_host_stashes,
        num_host_crossings=num_host_crossings,
        weights=() if into is None else into.weights,
        gradients=() if into is None else into.gradients,
        **carried(ticks),
        **tables,
    )


def _colour(
    held: dict[str, Values], on_host: dict[str, Mask], name: str, num_ranks: int
) -> tuple[tuple[int, int], Ints]:
    """The number of places on the device and on the host, and [N] the place of each value."""
    counts: list[int] = []
    places = np.zeros(len(held[name].rank), np.int64)
    for chosen in (~on_host[name], on_host[name]):
        rank, _, born, read, _ = (column[..., chosen] for column in held[name])
        count, found = colour(rank, born, read, num_ranks)
        places[chosen] = sum(counts) + found
        counts.append(count)
    return (counts[0], counts[1]), places


def _ops(
    ticks: Ticks,
    shared: Shared,
    held: dict[str, Values],
    on_host: dict[str, Mask],
    moved: Sequence[Ints],
) -> tuple[list[tuple[Op, ...]], Ints]:
    """The ops of each slot, in the order of their fields, and [A] the branch of each action.

    Args:
      ticks: the layout.
      shared: which ends of the model all ranks share.
      held: values by table column.
      on_host: [N] by name, which of them lie in host memory.
      moved: [A] each, the chunk whose weights are gathered beside an action, and that whose
        gradients are shared out, -1 for none.
    """
    schedule, flat = ticks.schedule, flatten(ticks.schedule)
    first = -1 if "embed" in shared else 0
    last = -1 if "head" in shared else schedule.num_stages - 1
    stages = [(chunk, k == first, k == last) for k, chunk in enumerate(schedule.chunk_of)]
    kinds = sorted(set(stages))
    columns = [flat.kind, np.array([kinds.index(s) for s in stages])[flat.stage]]
    for name in ("stash", "crossing"):
        hosted = np.zeros((ticks.num_ticks * ticks.width, schedule.num_ranks), bool)
        for times in held[name].touched:
            does = on_host[name] & (times >= 0)
            hosted[times[does], held[name].rank[does]] = True
        columns.append(hosted[ticks.times, flat.rank])
    slot, num_chunks = ticks.times % ticks.width, schedule.num_stages // schedule.num_ranks
    columns = [slot, *columns, *(chunks + 1 for chunks in moved)]
    sizes = ticks.width, len(KINDS), len(kinds), 2, 2, *[num_chunks + 1] * len(moved)
    code, number = np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)
    fields = np.stack(np.unravel_index(code, sizes), axis=1)
    found: list[list[Op]] = [[] for _ in range(ticks.width)]
    for n, kind, stage, stash, crossing, gathers, reduces in fields.tolist():
        chunk, is_first, is_last = kinds[stage]
        pools = bool(stash), bool(crossing)
        op = Op(KINDS[kind], chunk, is_first, is_last, *pools, gathers - 1, reduces - 1)
        found[n].append(op)
    before = np.searchsorted(fields[:, 0], np.arange(ticks.width))
    return [tuple(ops) for ops in found], number - before[slot] + 1


def _channels(ticks: Ticks, messages: Values) -> tuple[list[tuple[Channel, ...]], Ints]:
    """The static permutations of each slot, and [N] the channel that brings each message."""
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
    channels = [tuple(Channel(d, tuple(pairs)) for d, pairs in found.items()) for found in edges]
    return channels, channel[slot, shift]
