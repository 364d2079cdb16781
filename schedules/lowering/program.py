"""The lowered form of a schedule: tables of integers that the kernel scans over.

A program is T ticks; a tick is a fixed sequence of slots; a slot is at most one action per
rank, ended by neighbour exchanges over the static permutations of its channels. Letters as in
`schedules.core.action`; C is the number of channels of a slot.

Every rank owns three pools. *Buffers* hold activation-shaped messages: a stage's input from its
arrival until the last action that reads it, a gradient from its arrival until its backward.
*Stashes* hold residuals of a forward pass until its backward (``keep="residuals"`` only).
*Crossings* hold what I leaves for W, until then; W reads nothing else, so the operand, the
gradient and the stash of a split backward end at its I. Buffer ``num_buffers``, stash
``num_stashes`` and crossing ``num_crossings``, one past the last, are trash: what nobody reads is
written there, so that no store needs a condition.

Stashes and crossings may lie in host memory (`schedules.clocks.hosted`). Places of the host's
pool follow those of the device's in one numbering, and trash follows both; an op says in which pool
its action's places are. With ``keep="input"`` a stash on the host holds the input of a stage: F
copies it there and its message buffer is free.

Where ranks share an end of the model (`schedules.clocks.shared`), three more tables say what all of
them do together around a slot. The embedding of a microbatch is then in the buffer that the first
stage's F reads as its operand, put there before the slot; the head's gradient arrives where the
last stage's output would, along the channel of shift 0.

Where weights lie in parts on several devices, whole ones of a chunk are in a *window* while its
actions run (`schedules.clocks.windows`); which, follows from the chunk alone. The next chunk that
is not in its own is gathered beside the action before the first that reads it. Gradients have such
windows too: a chunk's are shared out beside the action after the last of a run that adds to them.

A schedule with N slices has two pools more. *Carries* hold what a slice leaves for the later slices
of its microbatch in the same stage (keys and values), from its F to the last action that reads
them. *Carry gradients* hold their gradients, from the backward of the last slice, which is the
first to run, to that of their own slice. An action names one place for each of the N slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.clocks.hosted import Keep
from schedules.core.action import Kind
from schedules.orders.schedule import Schedule

Table = NDArray[np.int32]
FIELDS = ("op", "microbatch", "operand", "gradient", "stash", "crossing", "arrival")  # its tables
COMMON = ("lookup", "head", "scatter")  # tables of what all ranks do together
CARRIED = ("carry", "carry_gradient")  # tables of what slices leave for later ones


class Op(NamedTuple):
    """A branch of the kernel: actions of one kind on one chunk that touch the same ends.

    Attributes:
      kind: what it computes.
      chunk: which of the rank's V stages.
      first: it is stage 0, whose input is made from the user's inputs, not from a message. Where
        all ranks share the embedding, no op is first.
      last: it is stage K-1, whose output goes to the loss; its backward starts there. Where all
        ranks share the head, no op is last.
      stash_on_host: the stash that it writes or reads lies in host memory.
      crossing_on_host: its crossing does.
      gathers: the chunk whose weights are gathered into their window beside it, -1 for none.
      reduces: the chunk whose gradients are shared out from their window beside it, likewise.
    """

    kind: Kind
    chunk: int
    first: bool
    last: bool
    stash_on_host: bool = False
    crossing_on_host: bool = False
    gathers: int = -1
    reduces: int = -1

    @property
    def label(self) -> str:
        """``F0``, ``B1_last``, ``I0_stash``: its name among the ops of a slot.

        A suffix ``_stash`` or ``_crossing`` says that this lies in host memory, ``_gathers1``
        that chunk 1 is gathered, ``_reduces1`` that its gradients are shared out.
        """
        ends = f"{'_first' * self.first}{'_last' * self.last}"
        host = f"{'_stash' * self.stash_on_host}{'_crossing' * self.crossing_on_host}"
        chunks = {"gathers": self.gathers, "reduces": self.reduces}
        beside = "".join(f"_{name}{chunk}" for name, chunk in chunks.items() if chunk >= 0)
        return f"{self.kind}{self.chunk}{ends}{host}{beside}"

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
      channels: the exchanges that end it; in a delayed program those between ranks run beside it,
        with the messages of the slot before.
    """

    kinds: str
    ops: tuple[Op, ...]
    channels: tuple[Channel, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule.

    Attributes:
      schedule: what was lowered.
      keep: what a forward pass leaves for its backward: the stage's input or its residuals.
      slots: the slots of one tick.
      op: [T, slots, S] branch, 0 where idle.
      microbatch: [T, slots, S] microbatch of the action, 0 where idle; of a schedule with slices,
        here and below, the number of its unit.
      operand: [T, slots, S] buffer of the stage input; trash where the action reads none.
      gradient: [T, slots, S] buffer that a backward starts from: the message from the next
        stage or, on the last stage with ``keep="residuals"``, that stage's own output.
      stash: [T, slots, S] stash that F writes or a backward reads.
      crossing: [T, slots, S] crossing that I writes or W reads.
      arrival: [T, slots, S, C] buffer where each channel's message is stored; C is the largest
        number of channels of any slot, columns beyond a slot's own are trash.
      lookup: [T, slots] microbatch that all ranks embed before the slot, -1 for none.
      head: [T, slots] microbatch whose head all ranks do after the slot's actions, -1 for none.
      scatter: [T, slots] microbatch whose embedding's gradient all ranks add up then, likewise.
      carry: [T, slots, S, N] places of the carries of the microbatch's N slices, those of earlier
        slices to be read and, in F, that of its own to be written; trash for others. Empty tables
        without slices.
      carry_gradient: [T, slots, S, N] places of their gradients, which a backward adds to and,
        that of its own slice, reads.
      weights: [V] the window in which each chunk's whole weights are; chunk 0 is there before the
        first tick. Empty where actions find whole weights.
      gradients: [V] that in which its gradients are added up, likewise.
      num_buffers: message buffers per rank, the peak over ranks.
      num_stashes: residual stashes per rank in device memory, the peak over ranks.
      num_crossings: crossings per rank in device memory, the peak over ranks.
      num_host_stashes: stashes per rank in host memory, the peak over ranks.
      num_host_crossings: crossings per rank in host memory, the peak over ranks.
      num_carries: carries per rank, the peak over ranks; of slices, each 1/N of a microbatch.
      num_carry_gradients: gradients of carries per rank, the peak over ranks.
      delayed: whether a message to another rank is held for a slot, travels beside the work of the
        next one and is stored when that ends. Every rank then holds one message more, in no
        buffer: what its last slot has sent. A message that stays on its rank is stored at once.
    """

    schedule: Schedule
    keep: Keep
    slots: tuple[Slot, ...]
    op: Table
    microbatch: Table
    operand: Table
    gradient: Table
    stash: Table
    crossing: Table
    arrival: Table
    lookup: Table
    head: Table
    scatter: Table
    num_buffers: int
    num_stashes: int
    num_crossings: int
    delayed: bool = False
    num_host_stashes: int = 0
    num_host_crossings: int = 0
    carry: Table = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.int32))
    carry_gradient: Table = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.int32))
    num_carries: int = 0
    num_carry_gradients: int = 0
    weights: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    @property
    def rank_tables(self) -> tuple[str, ...]:
        """Names of the tables that have a column for each rank."""
        return FIELDS if self.schedule.num_slices == 1 else (*FIELDS, *CARRIED)

    @property
    def trash(self) -> dict[str, int]:
        """The place of every pool that nobody reads, by the name of its table column."""
        return {
            "operand": self.num_buffers,
            "gradient": self.num_buffers,
            "stash": self.num_stashes + self.num_host_stashes,
            "crossing": self.num_crossings + self.num_host_crossings,
            "arrival": self.num_buffers,
            "carry": self.num_carries,
            "carry_gradient": self.num_carry_gradients,
        }

    @property
    def num_ticks(self) -> int:
        """T."""
        return int(self.op.shape[0])

    @property
    def shared(self) -> tuple[str, ...]:
        """Ends of the model that all ranks share."""
        found = {"embed": self.lookup, "head": self.head}
        return tuple(part for part, table in found.items() if (table >= 0).any())

    def ends_of(self, stage: int) -> tuple[bool, bool]:
        """Tell whether the ops of a stage are `Op.first` and `Op.last`."""
        shared, last = self.shared, self.schedule.num_stages - 1
        return stage == 0 and "embed" not in shared, stage == last and "head" not in shared

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of each slot: what a tick looks like."""
        return tuple(slot.kinds for slot in self.slots)
