"""The lowered form of a schedule: tables of integers that the kernel scans over.

A program is T ticks; a tick is a fixed sequence of slots; a slot is at most one action per
rank, ended by neighbour exchanges over the static permutations of its channels. Letters as in
`schedules.core.action`; C is the number of channels of a slot, N that of slices.

Between slots every rank keeps values in numbered places. `schedules.lowering.kinds` lists the kinds
of values, and a program has a `Placement` for each: a table that says which place an action reads
or writes, and the number of places. The places in host memory come after those on the device in one
numbering. One more number, `Placement.discard`, is for values that no action reads, so that no
store needs a condition. The crossing of a split backward is held from I to W; the operand, the
gradient and the stash end at I.

Where ranks share an end of the model (`schedules.clocks.shared`), three more tables say what all of
them do together around a slot. The embedding of a microbatch is then in the buffer that the first
stage's F reads as its operand, put there before the slot; the head's gradient arrives where the
last stage's output would, along the channel of shift 0.

Where devices store parts of the weights, the whole weights of a chunk are in a *window* while its
actions run (`schedules.lowering.windows`). A job beside an action gathers the next chunk, or
reduces the gradients of the chunk that the rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.clocks.shared import Together
from schedules.core.action import Kind
from schedules.core.flat import Mask
from schedules.lowering.hosted import Keep
from schedules.lowering.kinds import kinds_of
from schedules.lowering.windows import Windows
from schedules.orders.schedule import Schedule

Table = NDArray[np.int32]
COMMON = Together._fields  # names of the tables of what all ranks do together
JOBS = ("gather", "reduce")  # names of jobs, in the order in which they stand in an op


class Job(NamedTuple):
    """Work that runs during an action.

    Attributes:
      name: "gather", of a chunk's weights into their window, or "reduce", of its gradients.
      chunk: the chunk.
    """

    name: str
    chunk: int


class Op(NamedTuple):
    """A branch of the kernel: actions of one kind on one chunk that touch the same ends.

    Attributes:
      kind: what it computes.
      chunk: the index among the rank's V stages.
      first: it is stage 0, whose input is made from the user's inputs, not from a message. Where
        all ranks share the embedding, no op is first.
      last: it is stage K-1, whose output goes to the loss; its backward starts there. Where all
        ranks share the head, no op is last.
      host: names of the kinds of values that it writes or reads in host memory.
      jobs: the jobs that run during it, a gather before a reduce.
    """

    kind: Kind
    chunk: int
    first: bool
    last: bool
    host: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()

    @property
    def label(self) -> str:
        """``F0``, ``B1_last``, ``I0_stash``: its name among the ops of a slot.

        A suffix ``_stash`` or ``_crossing`` says that this value is in host memory, ``_gathers1``
        that chunk 1 is gathered, ``_reduces1`` that its gradients are reduced.
        """
        ends = f"{'_first' * self.first}{'_last' * self.last}"
        host = "".join(f"_{name}" for name in self.host)
        jobs = "".join(f"_{name}s{chunk}" for name, chunk in self.jobs)
        return f"{self.kind}{self.chunk}{ends}{host}{jobs}"

    def __repr__(self) -> str:
        shown = self._asdict()
        fields = (
            f"{name}={value!r}"
            for name, value in shown.items()
            if name not in self._field_defaults or value != self._field_defaults[name]
        )
        return f"Op({', '.join(fields)})"


class Channel(NamedTuple):
    """A static permutation whose messages are stored when a slot ends.

    Attributes:
      shift: destination minus source, modulo S; 0 means a store on the same rank.
      edges: (source, destination) ranks, each rank at most once on either side.
    """

    shift: int
    edges: tuple[tuple[int, int], ...]


class Slot(NamedTuple):
    """A part of every tick.

    Attributes:
      kinds: the kinds of action that may run in it, such as "F" or "BIW".
      ops: the ops that occur in it; op i is branch i + 1, branch 0 is idle.
      channels: the exchanges that end it; in a delayed program exchanges between ranks run during
        the slot, with the messages of the previous slot.
    """

    kinds: str
    ops: tuple[Op, ...]
    channels: tuple[Channel, ...]


class Placement(NamedTuple):
    """The places of one kind of values, and the place that each action reads or writes.

    Attributes:
      table: [T, slots, S] or, of a kind that is `ValueKind.per_slice`, [T, slots, S, N]: a place,
        `discard` where the action has no such value or the rank is idle.
      device: places per rank on the device, the peak over ranks.
      host: places per rank in host memory, the peak over ranks; their numbers start at ``device``.
    """

    table: Table
    device: int
    host: int = 0

    @property
    def discard(self) -> int:
        """The place that no action reads: one past the last."""
        return self.device + self.host


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule.

    Attributes:
      schedule: the lowered schedule.
      keep: the values that F keeps for its backward: the stage's input or its residuals.
      slots: the slots of one tick.
      op: [T, slots, S] branch, 0 where idle.
      microbatch: [T, slots, S] microbatch of the action, 0 where idle; of a schedule with slices,
        here and below, the number of its unit.
      arrival: [T, slots, S, C] the buffer in which each channel's message is stored, or the discard
        place if no action reads it; C is the largest number of channels of any slot.
      values: the placement by name of a `ValueKind`. Kinds of one pool have the same places.
        Without slices there are no carries.
      common: [T, slots] tables of the microbatch that all ranks work on around the slot, -1 for
        none.
      delayed: whether a message to another rank travels during the work of the next slot and is
        stored at its end. Every rank then holds one message more, outside the buffers: the message
        of its last slot. A message that stays on its rank is stored at once.
      windows: the windows of the weights and gradients of each chunk; None if weights are not
        sharded. Chunk 0 is in its window before the first tick.
    """

    schedule: Schedule
    keep: Keep
    slots: tuple[Slot, ...]
    op: Table
    microbatch: Table
    arrival: Table
    values: dict[str, Placement]
    common: Together
    delayed: bool = False
    windows: Windows | None = None

    @property
    def rank_tables(self) -> dict[str, Table]:
        """The tables with a column for each rank, by name, in the order of a program's fields."""
        # jax makes a constant of each table in this order, and other text is another cache entry.
        tables = {name: placement.table for name, placement in self.values.items()}
        kinds = kinds_of(self.schedule.num_slices)
        carries = {kind.name: tables.pop(kind.name) for kind in kinds if kind.per_slice}
        actions = {"op": self.op, "microbatch": self.microbatch}
        return {**actions, **tables, "arrival": self.arrival, **carries}

    @property
    def arrives(self) -> Mask:
        """[T, slots, S, C] whether a channel brings a rank a message that the rank reads."""
        return np.asarray(self.arrival != self.values["operand"].discard)

    @property
    def num_ticks(self) -> int:
        """The number of ticks T."""
        return int(self.op.shape[0])

    @property
    def shared(self) -> tuple[str, ...]:
        """Ends of the model that all ranks share."""
        # `parts` orders the names in this way, too.
        tables = {"embed": self.common.lookup, "head": self.common.head}
        return tuple(part for part, table in tables.items() if (table >= 0).any())

    def ends_of(self, stage: int) -> tuple[bool, bool]:
        """Tell whether the ops of a stage are `Op.first` and `Op.last`."""
        shared, last = self.shared, self.schedule.num_stages - 1
        return stage == 0 and "embed" not in shared, stage == last and "head" not in shared

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of each slot of a tick."""
        return tuple(slot.kinds for slot in self.slots)
