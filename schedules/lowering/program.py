"""The lowered form of a schedule: tables of integers that the kernel scans over.

A program has T ticks. A tick is a fixed sequence of slots. In a slot each rank runs at most one
action, and the slot ends with neighbour exchanges over the static permutations of its channels. C
is the number of channels of a slot, N is the number of slices.

Between slots every rank keeps values in numbered places. `schedules.lowering.kinds` lists the kinds
of values. A program has a `Placement` for each kind: a table of the place that each action reads or
writes, and the number of places. The first numbers are places on the device, the next are places in
host memory. One more number, `Placement.discard`, is for values that no action reads, so that no
store needs a condition. The crossing, the values that I passes to W, is stored from I to W; the
operand, the gradient and the stash are freed after I.

If all ranks share embed or head (`schedules.clocks.shared`), three more tables give the work of all
ranks around a slot. The embedding of a microbatch is then put, before the slot, into the buffer
that the first stage's F reads as its operand. The gradient from the head arrives along the channel
of shift 0, in the place of the last stage's output.

If weights are sharded over devices, the whole weights of a chunk are in a *window* while its
actions run (`schedules.lowering.windows`). A job that runs during an action gathers the next chunk,
or reduces the gradients of the chunk that the rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.clocks.hosted import Keep
from schedules.clocks.shared import Together
from schedules.core.action import Kind
from schedules.core.flat import Mask
from schedules.core.schedule import Schedule
from schedules.lowering.kinds import kinds_of
from schedules.lowering.windows import Windows

Table = NDArray[np.int32]
COMMON = Together._fields  # names of the tables of work that all ranks do together
JOBS = ("gather", "reduce")  # names of jobs, in the order of the jobs of an op


class Job(NamedTuple):
    """Work that runs during an action.

    Attributes:
      name: "gather" for a chunk's weights into their window, or "reduce" for its gradients.
    """

    name: str
    chunk: int


class Op(NamedTuple):
    """A branch of the kernel, for actions of one kind on one chunk with the same ends of the model.

    Attributes:
      chunk: the index of the stage among the rank's V stages.
      first: whether the actions are on stage 0, whose input is made from the user's inputs, not
        from a message. If all ranks share the embedding, no op is first.
      last: whether the actions are on stage K-1, whose output goes to the loss; the backward starts
        there. If all ranks share the head, no op is last.
      host: names of the kinds of values that the actions write or read in host memory.
      jobs: the jobs that run during the action, a gather before a reduce.
    """

    kind: Kind
    chunk: int
    first: bool
    last: bool
    host: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()

    @property
    def label(self) -> str:
        """The name among the ops of a slot, such as ``F0``, ``B1_last`` or ``I0_stash``.

        A suffix ``_stash`` or ``_crossing`` means that this value is in host memory, ``_gathers1``
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
      shift: (destination - source) modulo S; 0 means a store on the same rank.
      edges: (source, destination) ranks, each rank at most once on either side.
    """

    shift: int
    edges: tuple[tuple[int, int], ...]


class Slot(NamedTuple):
    """A slot of every tick: its ops, and the exchanges at its end.

    Attributes:
      kinds: the kinds of action that may run in the slot, such as "F" or "BIW".
      ops: the ops that occur in the slot; op i is branch i + 1, branch 0 is idle.
      channels: the exchanges at the slot's end; in a delayed program an exchange between ranks runs
        during the slot, with the messages of the previous slot.
    """

    kinds: str
    ops: tuple[Op, ...]
    channels: tuple[Channel, ...]


class Placement(NamedTuple):
    """The places of one kind of values, and the place that each action reads or writes.

    Attributes:
      table: [T, slots, S], or [T, slots, S, N] if the kind is `ValueKind.per_slice`: a place, or
        `discard` if the action has no such value or the rank is idle.
      device: the number of places per rank on the device, the peak over ranks.
      host: the number of places per rank in host memory, the peak over ranks; the numbers of these
        places start at ``device``.
    """

    table: Table
    device: int
    host: int = 0

    @property
    def discard(self) -> int:
        """The place that no action reads: the number after the last place."""
        return self.device + self.host


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule.

    Attributes:
      keep: the values that F keeps for its backward: the stage's input or its residuals.
      slots: the slots of one tick.
      op: [T, slots, S] the branch, 0 if idle.
      microbatch: [T, slots, S] the microbatch of the action, 0 if idle. In a schedule with slices
        every microbatch number of a program is the number of a unit.
      arrival: [T, slots, S, C] the buffer in which each channel's message is stored, or the discard
        place if no action reads it; C is the largest number of channels of any slot.
      values: the placements, by name of a `ValueKind`. Kinds of one pool have the same places.
        Without slices there are no carries.
      common: [T, slots] tables of the microbatch that all ranks work on around the slot, -1 for
        none.
      delayed: whether a message to another rank is sent during the work of the next slot and is
        stored at its end. Every rank then holds, outside the buffers, one more message: the message
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
        # jax makes constants of the tables in this order; another order would miss the compilation
        # cache.
        tables = {name: placement.table for name, placement in self.values.items()}
        kinds = kinds_of(self.schedule.num_slices)
        carries = {kind.name: tables.pop(kind.name) for kind in kinds if kind.per_slice}
        actions = {"op": self.op, "microbatch": self.microbatch}
        return {**actions, **tables, "arrival": self.arrival, **carries}

    @property
    def arrives(self) -> Mask:
        """[T, slots, S, C] flags of the messages that the receiving rank reads."""
        return np.asarray(self.arrival != self.values["operand"].discard)

    @property
    def num_ticks(self) -> int:
        """The number of ticks T."""
        return int(self.op.shape[0])

    @property
    def shared(self) -> tuple[str, ...]:
        """The ends of the model that all ranks share."""
        # The order is that of `parts`.
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
