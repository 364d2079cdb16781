"""The ticks of a program, one after the other: a `lax.scan` over its table.

Letters: S ranks, T ticks. For every slot of a tick a rank runs what its row of the table says,
sends the message along the slot's channels and stores what arrives where the table says. Where
sends are delayed the scan carries the message of the slot before, whose exchange then depends on
nothing that the slot computes: the compiler may run both at a time. A message takes the place of
the last that has been exchanged, so that of two slots each has a place of its own.

A loop over ticks compiles all that any of them does, and in each exchanges in all directions that
any of them needs. An idle action costs nothing, an exchange its bytes, whoever reads them. Where
all that happens before a tick is other than what happens from it on (first all forwards, then all
backwards), a loop for either compiles nothing twice, and exchanges only where its messages go.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from collectives import STAGE, exchange
from pipeline.base.tree import Tree
from pipeline.core.kernel import scopes
from pipeline.core.kernel.actions import Actions, Row
from pipeline.core.kernel.grouped import runner
from pipeline.core.kernel.memory import run_once
from pipeline.core.kernel.scopes import COMMON
from pipeline.core.kernel.vocabulary import VocabularyParallel, busy_in
from schedules.lowering.program import Channel, Program, Slot

UNUSED, WAIT, WORK = range(3)  # what ranks do in a slot: nothing, take messages, run actions
MOST_SEGMENTS = 8  # scans of their own for parts of a timetable, before it is one scan


def run_ticks(actions: Actions, program: Program, tables: Row, *, masked: bool) -> None:
    """Run every tick; results are left in the memory of ``actions``."""
    delayed, run = program.delayed, runner(actions, masked=masked)
    common = VocabularyParallel(actions, program, masked=masked) if program.shared else None

    def tick(
        part: tuple[int, int], uses: tuple[int, ...], busy: Any, held: Tree, rows: Row
    ) -> tuple[Tree, None]:
        spent = None  # the last message that has been exchanged
        for index in np.flatnonzero(uses).tolist():
            need, row = needed(program, index, *part), {name: rows[name][index] for name in rows}
            if need.is_part:
                row["op"] = jnp.asarray(need.branch)[row["op"]]
            abroad = [channel for _, channel in need.channels if channel.shift]
            # Delayed sends stand before the work and need nothing of it.
            brought = {c: exchange(held, c.edges, STAGE) for c in abroad if delayed}
            with jax.named_scope(scopes.of_slot(index)):
                if common:
                    common.before(row, busy[index])
                message = actions.no_message() if spent is None else spent
                if uses[index] == WORK:
                    message = run(need.slot, row, message)
                if common:
                    message = common.after(row, busy[index], message)
            for column, channel in need.channels:
                arrived = brought.get(channel, message)
                if channel.shift and not delayed:
                    arrived = exchange(message, channel.edges, STAGE)
                actions.memory.buffers[row["arrival"][column]] = arrived
            spent, held = (held, message) if delayed else (message, None)
        return held, None

    local = {name: table if name in COMMON else table[0] for name, table in tables.items()}
    held = actions.no_message() if delayed else None
    for start, stop, uses in segments(program, split=masked):
        busy = busy_in(program, start, stop)
        with jax.named_scope(scopes.of_ticks(start, stop)):
            if stop - start == 1:
                row = {name: table[start] for name, table in local.items()}
                action = functools.partial(tick, (start, stop), uses, busy, held, row)
                held, _ = run_once(action, (held, None))
                continue
            rows = {name: table[start:stop] for name, table in local.items()}
            body = functools.partial(tick, (start, stop), uses, busy)
            held, _ = jax.lax.scan(body, held, rows)


# --- what of a program a run of ticks needs ---


def segments(program: Program, *, split: bool) -> list[tuple[int, int, tuple[int, ...]]]:
    """Runs of ticks (start, stop), and of each slot whether some rank works or waits in them.

    An idle branch costs nothing, so the kernel that branches starts a new run only where all that
    happens changes (`segment_starts`). Without branches an unused slot costs its full
    time: warm-up, steady state and cool-down are scans of their own, unless a timetable changes so
    often that compile time would suffer. Where sends are delayed a message may arrive in a slot
    that nobody works in.
    """
    waits = (program.arrival != program.num_buffers).any(axis=(2, 3))
    uses = np.where((program.op != 0).any(axis=2), WORK, np.where(waits, WAIT, UNUSED))
    starts = segment_starts(program)
    few = starts if len(starts) < MOST_SEGMENTS else []

    def runs(cuts: Iterable[int]) -> list[tuple[int, int, tuple[int, ...]]]:
        pairs = itertools.pairwise([0, *cuts, program.num_ticks])
        return [(a, b, tuple(uses[a:b].max(axis=0).tolist())) for a, b in pairs]

    if not split:
        return runs(few)
    works = np.concatenate([uses, *(getattr(program, name) >= 0 for name in COMMON)], axis=1)
    changed = 1 + np.flatnonzero((works[1:] != works[:-1]).any(axis=1))
    changes = sorted({*changed.tolist(), *few})
    return runs(changes if len(changes) < MOST_SEGMENTS else few)


def without(program: Program, sends: Sequence[bool]) -> Program:
    """The program without messages of gradients that nobody needs, so without their exchanges.

    Args:
      program: any.
      sends: [K] whether a stage has a gradient for its input to send.
    """
    if all(sends):
        return program
    schedule = program.schedule
    empty = np.zeros(program.op.shape, bool)
    for index, slot in enumerate(program.slots):
        for rank, held in enumerate(schedule.stages_of):
            idle = [op.kind in "BI" and not sends[held[op.chunk]] for op in slot.ops]
            empty[:, index, rank] = np.array([False, *idle])[program.op[:, index, rank]]
    before = np.roll(empty.reshape(-1, schedule.num_ranks), 1, axis=0).reshape(empty.shape)
    before[0, 0] = False
    arrival = program.arrival.copy()
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            sent = before if program.delayed and channel.shift else empty
            for source, destination in channel.edges:
                arrival[sent[:, index, source], index, destination, column] = program.num_buffers
    return replace(program, arrival=arrival)


def was_sent(program: Program, runs: jax.Array) -> jax.Array:
    """[T, slots, S, C] whether what a channel brings is from an entry that runs.

    Args:
      program: any.
      runs: [T, slots, S] the entries of its table that do.
    """
    num_slots, num_ranks, num_channels = program.arrival.shape[1:]
    source = np.zeros((num_slots, num_ranks, num_channels), np.int32)
    late = np.zeros(source.shape, bool)
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            late[index, :, column] = program.delayed and channel.shift != 0
            for rank, destination in channel.edges:
                source[index, destination, column] = rank
    slots = np.arange(num_slots)[:, None, None]
    before = jnp.roll(runs.reshape(-1, num_ranks), 1, axis=0).reshape(runs.shape)
    return jnp.where(late, before[:, slots, source], runs[:, slots, source])


@dataclass(frozen=True, eq=False)
class Needed:
    """A slot with only what some ticks need of it.

    Attributes:
      slot: with those of its ops that occur, and all of its channels.
      branch: for each branch of the program's slot that of this one, 0 where it does not occur.
      channels: by the column of their arrivals, those that bring anything, with edges that do.
    """

    slot: Slot
    branch: NDArray[np.int32]
    channels: tuple[tuple[int, Channel], ...]

    @property
    def is_part(self) -> bool:
        """True if branches have other numbers than the program's."""
        return bool((self.branch != np.arange(len(self.branch))).any())


def needed(program: Program, index: int, start: int, stop: int) -> Needed:
    """Find the actions that ticks start..stop - 1 need in a slot."""
    slot, occurs = program.slots[index], set(np.unique(program.op[start:stop, index]).tolist())
    ops = [(n, op) for n, op in enumerate(slot.ops, start=1) if n in occurs]
    branch = np.zeros(len(slot.ops) + 1, np.int32)
    for new, (old, _) in enumerate(ops, start=1):
        branch[old] = new
    reads: Any = _reads(program)[start:stop, index].any(axis=0)  # [S, C]
    channels = []
    for column, channel in enumerate(slot.channels):
        edges = tuple(edge for edge in channel.edges if reads[edge[1], column])
        if edges:
            channels.append((column, Channel(channel.shift, edges)))
    part = Slot(slot.kinds, tuple(op for _, op in ops), slot.channels)
    return Needed(part, branch, tuple(channels))


def segment_starts(program: Program) -> list[int]:
    """The ticks at which all that happens becomes other, and exchanges other directions."""
    happens = _happens(program)
    first, last = happens.argmax(axis=0), program.num_ticks - 1 - happens[::-1].argmax(axis=0)
    ticks = np.arange(1, program.num_ticks)[:, None]
    can = 1 + np.flatnonzero(~((first < ticks) & (last >= ticks)).any(axis=1))
    used = _reads(program)
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            used[:, index, :, column] &= channel.shift != 0
    found: list[int] = []
    before: set[int] = set()
    for start, stop in zip([0, *can], [*can, program.num_ticks], strict=True):
        here = set(np.flatnonzero(used[start:stop].any(axis=0)).tolist())
        if here:
            if before and here != before:
                found.append(int(start))
            before = here
    return found


def _reads(program: Program) -> NDArray[np.bool_]:
    """[T, slots, S, C] whether a rank reads what a channel brings it."""
    return np.asarray(program.arrival != program.num_buffers)


def _happens(program: Program) -> NDArray[np.bool_]:
    """[T, things] what runs in which ticks: branches of slots, and what all ranks do together."""
    columns = [
        (program.op[:, index] == branch).any(axis=1)
        for index, slot in enumerate(program.slots)
        for branch in range(1, len(slot.ops) + 1)
    ]
    columns += [
        column for name in COMMON for column in (getattr(program, name) >= 0).T if column.any()
    ]
    return np.stack([column for column in columns if column.any()], axis=1)
