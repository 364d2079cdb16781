"""From a schedule to a program: choose the slots of a tick, give every value a place.

Letters as in `schedules.ir`. Places are assigned by liveness: a value holds its place from the
slot at whose end it arrives to the slot that reads it last. A freed place is used again, so the
number of places is the true peak.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from schedules.costs import Costs
from schedules.ir import Action, Schedule, ScheduleError
from schedules.program import Channel, Keep, Op, Program, Slot, Table
from schedules.ticks import Ticks, best_ticks


def lower(
    schedule: Schedule,
    *,
    keep: Keep = "input",
    pattern: str | None = None,
    costs: Costs | None = None,
    partners: bool = False,
) -> Program:
    """Compile a schedule; no rank's order changes.

    Args:
      schedule: a legal schedule (`check`).
      keep: what F leaves for its backward, the stage's input or its residuals.
      pattern: the slots of a tick: "single" (one action of any kind), "paired" (an F slot, then
        a backward slot), "unit" (F, then B or I, then W) or "partner" (two slots; ranks of one
        parity run F while those of the other run backwards, so that classic 1F1B exchanges
        between disjoint pairs); by default the one with the smallest lockstep makespan.
      costs: durations for that choice; by default F = I = W.
      partners: exchanges make only those ranks meet that they join, not all; for that choice.

    Raises:
      ScheduleError: unknown keep or pattern, or the schedule deadlocks.
    """
    if keep not in ("input", "residuals"):
        raise ScheduleError(f"keep={keep!r}: must be 'input' or 'residuals'")
    return allocate(best_ticks(schedule, pattern, costs or Costs(), partners=partners), keep)


class _Value(NamedTuple):
    """Something a rank holds from the end of slot ``born`` until slot ``read``."""

    rank: int
    born: int
    read: int
    source: int  # the rank that sends it
    readers: tuple[tuple[int, str], ...]  # (time, table column) of every slot that touches it


def allocate(ticks: Ticks, keep: Keep) -> Program:
    """Give every value of a layout its place and write the tables."""
    schedule, width = ticks.schedule, ticks.width
    messages, residuals = _values(ticks, keep)
    num_buffers, buffer_of = _colour(messages)
    num_stashes, stash_of = _colour(residuals)
    slots = _slots(ticks, messages)

    shape = (ticks.num_ticks, width, schedule.num_ranks)
    num_channels = max(len(slot.channels) for slot in slots)
    table: dict[str, Table] = {
        "op": np.zeros(shape, np.int32),
        "microbatch": np.zeros(shape, np.int32),
        "operand": np.full(shape, num_buffers, np.int32),
        "gradient": np.full(shape, num_buffers, np.int32),
        "stash": np.full(shape, num_stashes, np.int32),
        "arrival": np.full((*shape, num_channels), num_buffers, np.int32),
    }
    for time, rank, action in _timeline(ticks):
        tick, slot = divmod(time, width)
        table["op"][tick, slot, rank] = 1 + slots[slot].ops.index(_op(schedule, action))
        table["microbatch"][tick, slot, rank] = action.microbatch
    for value, place in zip(messages, buffer_of, strict=True):
        tick, slot = divmod(value.born, width)
        shifts = [channel.shift for channel in slots[slot].channels]
        channel = shifts.index((value.rank - value.source) % schedule.num_ranks)
        table["arrival"][tick, slot, value.rank, channel] = place
    for values, places in ((messages, buffer_of), (residuals, stash_of)):
        for value, place in zip(values, places, strict=True):
            for time, column in value.readers:
                table[column][(*divmod(time, width), value.rank)] = place
    return Program(
        schedule=schedule,
        keep=keep,
        slots=slots,
        num_buffers=num_buffers,
        num_stashes=num_stashes,
        **table,
    )


def _timeline(ticks: Ticks) -> Iterator[tuple[int, int, Action]]:
    """Every (time, rank, action) of a layout."""
    times = iter(ticks.times.tolist())
    for rank, order in enumerate(ticks.schedule.orders):
        for action in order:
            yield next(times), rank, action


def _values(ticks: Ticks, keep: Keep) -> tuple[list[_Value], list[_Value]]:
    """All messages, and all residuals, of a layout."""
    schedule = ticks.schedule
    when = {action: time for time, _, action in _timeline(ticks)}
    messages, residuals = [], []
    for k, rank in enumerate(schedule.placement):
        for m in range(schedule.num_microbatches):
            forward = when[Action(k, "F", m)]
            backward = [
                t for kind in ("B", "I", "W") if (t := when.get(Action(k, kind, m))) is not None
            ]
            if k > 0:
                born, source = when[Action(k - 1, "F", m)], schedule.placement[k - 1]
                reads = [forward, *backward] if keep == "input" else [forward]
                messages.append(_value(rank, born, source, "operand", reads))
            if not backward:
                continue
            if k < schedule.num_stages - 1:
                after = Action(k + 1, "B", m)
                born = when[after if after in when else after._replace(kind="I")]
                source = schedule.placement[k + 1]
                messages.append(_value(rank, born, source, "gradient", backward))
            elif keep == "residuals":  # the loss is taken, and differentiated, in the backward
                messages.append(_value(rank, forward, rank, "gradient", backward))
            if keep == "residuals":
                residuals.append(_value(rank, forward, rank, "stash", [forward, *backward]))
    return messages, residuals


def _value(rank: int, born: int, source: int, column: str, reads: list[int]) -> _Value:
    return _Value(rank, born, max(reads), source, tuple((time, column) for time in reads))


def _colour(values: Iterable[_Value]) -> tuple[int, list[int]]:
    """Places for values, per rank, such that none is shared while live; and how many it takes.

    First come, lowest free place: optimal for intervals. A value read for the last time in the
    slot at whose end another arrives makes room for it.
    """
    values = list(values)
    places, most = [0] * len(values), 0
    live: dict[int, list[tuple[int, int]]] = {}  # rank -> heap of (read, place)
    free: dict[int, list[int]] = {}  # rank -> heap of places used before
    used: dict[int, int] = {}
    for index in sorted(range(len(values)), key=lambda i: values[i].born):
        value = values[index]
        held, spare = live.setdefault(value.rank, []), free.setdefault(value.rank, [])
        while held and held[0][0] <= value.born:
            heapq.heappush(spare, heapq.heappop(held)[1])
        if spare:
            places[index] = heapq.heappop(spare)
        else:
            places[index] = used.get(value.rank, 0)
            used[value.rank] = places[index] + 1
            most = max(most, used[value.rank])
        heapq.heappush(held, (value.read, places[index]))
    return most, places


def _slots(ticks: Ticks, messages: Iterable[_Value]) -> tuple[Slot, ...]:
    """The ops and the static permutations that each slot of the pattern needs."""
    schedule, width = ticks.schedule, ticks.width
    ops: list[set[Op]] = [set() for _ in range(width)]
    edges: list[dict[int, set[tuple[int, int]]]] = [{} for _ in range(width)]
    for time, _, action in _timeline(ticks):
        ops[time % width].add(_op(schedule, action))
    for value in messages:
        shift = (value.rank - value.source) % schedule.num_ranks
        edges[value.born % width].setdefault(shift, set()).add((value.source, value.rank))
    return tuple(
        Slot(
            kinds,
            tuple(sorted(ops[s], key=lambda op: ("FBIW".index(op.kind), *op[1:]))),
            tuple(Channel(shift, tuple(sorted(edges[s][shift]))) for shift in sorted(edges[s])),
        )
        for s, kinds in enumerate(ticks.kinds)
    )


def _op(schedule: Schedule, action: Action) -> Op:
    stage = action.stage
    return Op(action.kind, schedule.chunk_of[stage], stage == 0, stage == schedule.num_stages - 1)
