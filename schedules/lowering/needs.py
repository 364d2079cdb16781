"""The parts of a program that a run of ticks needs: slots in use, branches, channels, segments.

Letters: S ranks, T ticks, C channels of a slot. A loop over ticks compiles the work of all its
ticks. This module therefore divides a program into several loops, and lists the exchanges that
carry messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedules.lowering.program import COMMON, Channel, Program, Slot

UNUSED, WAIT, WORK = range(3)  # a slot in which ranks do nothing, take messages, run actions
MOST_SEGMENTS = 8  # separate scans of a timetable; with more it is one scan


def segments(program: Program) -> list[tuple[int, int, tuple[int, ...]]]:
    """Find runs of ticks (start, stop), and the slots in which some rank works or waits.

    An idle branch costs nothing, so a new run starts only where all work changes
    (`segment_starts`). A timetable that changes too often is one run, to limit compile time. With
    delayed sends a message may arrive in a slot in which no rank works.
    """
    waits = program.arrives.any(axis=(2, 3))
    uses = np.where((program.op != 0).any(axis=2), WORK, np.where(waits, WAIT, UNUSED))
    starts = segment_starts(program)
    cuts = starts if len(starts) < MOST_SEGMENTS else []
    pairs = itertools.pairwise([0, *cuts, program.num_ticks])
    return [(a, b, tuple(uses[a:b].max(axis=0).tolist())) for a, b in pairs]


def without(program: Program, sends: Sequence[bool]) -> Program:
    """Remove the messages of gradients that no stage needs, and their exchanges, from a program.

    ``sends`` [K] tells whether a stage's backward has a gradient for the stage before.
    """
    if all(sends):
        return program
    # A slot of a rank is empty if its action would send a gradient that no stage needs.
    schedule = program.schedule
    empty = np.zeros(program.op.shape, bool)
    for index, slot in enumerate(program.slots):
        for rank, stages in enumerate(schedule.stages_of):
            idle = [op.kind in "BI" and not sends[stages[op.chunk]] for op in slot.ops]
            empty[:, index, rank] = np.array([False, *idle])[program.op[:, index, rank]]
    # A delayed message arrives at the end of the slot after the slot that sent it. In the first
    # slot of a program none arrives.
    before = np.roll(empty.reshape(-1, schedule.num_ranks), 1, axis=0).reshape(empty.shape)
    arrival, discard = program.arrival.copy(), program.values["operand"].discard
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            sent = before if program.delayed and channel.shift else empty
            for source, destination in channel.edges:
                arrival[sent[:, index, source], index, destination, column] = discard
    return replace(program, arrival=arrival)


def busy_in(program: Program, start: int, stop: int) -> list[dict[str, bool]]:
    """Find, for each slot, the tables of shared work that have entries in the given ticks."""
    works = [(table[start:stop] >= 0).any(axis=0).tolist() for table in program.common]
    return [dict(zip(COMMON, slot, strict=True)) for slot in zip(*works, strict=True)]


def num_gathers(program: Program) -> list[int]:
    """Count [S] the gathers of weights by each rank in a step; the program must have windows."""
    gathers = np.ones(program.schedule.num_ranks, np.int64)  # chunk 0 before the first tick
    for index, slot in enumerate(program.slots):
        does = np.array([False, *("gather" in dict(op.jobs) for op in slot.ops)])
        gathers += does[program.op[:, index]].sum(axis=0)
    counts: list[int] = gathers.tolist()
    return counts


def last_in_windows(program: Program) -> dict[int, list[bool]]:
    """Find the chunks whose gradients are still in a window after the last tick.

    Returns:
      For each such chunk [S] booleans: whether its gradients are in a window of the rank. Chunks
      whose gradients are in no rank's window are left out.
    """
    on_ranks: dict[int, list[bool]] = {}
    windows = program.windows.gradients if program.windows else ()
    for rank in range(program.schedule.num_ranks):
        summed: dict[int, int] = {}  # window -> the chunk whose gradients are in it
        for slots in program.op[:, :, rank].tolist():
            for slot, branch in zip(program.slots, slots, strict=True):
                if not branch:
                    continue
                op = slot.ops[branch - 1]
                for name, chunk in op.jobs:
                    if name == "reduce":
                        summed.pop(windows[chunk])
                if op.kind != "F":
                    summed[windows[op.chunk]] = op.chunk
        for chunk in summed.values():
            on_ranks.setdefault(chunk, [False] * program.schedule.num_ranks)[rank] = True
    return on_ranks


@dataclass(frozen=True, eq=False)
class Needed:
    """A slot reduced to the parts that some ticks need.

    Attributes:
      slot: the slot with only the ops that occur, and with all of its channels.
      branch: the branch of ``slot`` for each branch of the program's slot, 0 if it does not occur.
      channels: the channels that carry messages, as pairs of a column of arrival and a channel with
        only the edges in use.
    """

    slot: Slot
    branch: NDArray[np.int32]
    channels: tuple[tuple[int, Channel], ...]

    @property
    def is_part(self) -> bool:
        """True if the branches have other numbers than in the program."""
        return bool((self.branch != np.arange(len(self.branch))).any())


def needed(program: Program, index: int, start: int, stop: int) -> Needed:
    """Find the parts of a slot that the ticks start..stop - 1 need."""
    # A loop compiles a branch for each op, so ops that do not occur are dropped and the others are
    # renumbered.
    slot, occurs = program.slots[index], set(np.unique(program.op[start:stop, index]).tolist())
    ops = [(n, op) for n, op in enumerate(slot.ops, start=1) if n in occurs]
    branch = np.zeros(len(slot.ops) + 1, np.int32)
    for new, (old, _) in enumerate(ops, start=1):
        branch[old] = new
    # An exchange costs time even if no action reads its messages.
    reads: Any = program.arrives[start:stop, index].any(axis=0)  # [S, C]
    channels = []
    for column, channel in enumerate(slot.channels):
        edges = tuple(edge for edge in channel.edges if reads[edge[1], column])
        if edges:
            channels.append((column, Channel(channel.shift, edges)))
    part = Slot(slot.kinds, tuple(op for _, op in ops), slot.channels)
    return Needed(part, branch, tuple(channels))


def segment_starts(program: Program) -> list[int]:
    """List the ticks at which the work and the exchanges become entirely different."""
    # A cut may not separate ticks with the same work, because that code would be compiled twice.
    happens = _happens(program)
    first, last = happens.argmax(axis=0), program.num_ticks - 1 - happens[::-1].argmax(axis=0)
    ticks = np.arange(1, program.num_ticks)[:, None]
    can = 1 + np.flatnonzero(~((first < ticks) & (last >= ticks)).any(axis=1))
    # A cut pays only if the directions of the exchanges differ after it.
    used = program.arrives
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            used[:, index, :, column] &= channel.shift != 0
    starts: list[int] = []
    before: set[int] = set()
    for start, stop in zip([0, *can], [*can, program.num_ticks], strict=True):
        here = set(np.flatnonzero(used[start:stop].any(axis=0)).tolist())
        if here:
            if before and here != before:
                starts.append(int(start))
            before = here
    return starts


def _happens(program: Program) -> NDArray[np.bool_]:
    """Return [T, n] flags of the work in each tick: branches of slots, and shared work."""
    columns = [
        (program.op[:, index] == branch).any(axis=1)
        for index, slot in enumerate(program.slots)
        for branch in range(1, len(slot.ops) + 1)
    ]
    columns += [column for table in program.common for column in (table >= 0).T if column.any()]
    return np.stack([column for column in columns if column.any()], axis=1)
