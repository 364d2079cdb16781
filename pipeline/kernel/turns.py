"""What of a program's slots a run of ticks needs, and where it takes a turn.

A loop over ticks compiles all that any of them does, and in each exchanges in all directions that
any of them needs. An idle action costs nothing, an exchange its bytes, whoever reads them. Where
all that happens before a tick is other than what happens from it on (first all forwards, then all
backwards), a loop for either compiles nothing twice, and exchanges only where its messages go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.kernel.scopes import COMMON
from schedules.lowering.program import Channel, Program, Slot


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
        """Whether branches have other numbers than the program's."""
        return bool((self.branch != np.arange(len(self.branch))).any())


def needed(program: Program, index: int, start: int, stop: int) -> Needed:
    """What ticks start..stop - 1 need of a slot."""
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


def turns(program: Program) -> list[int]:
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
