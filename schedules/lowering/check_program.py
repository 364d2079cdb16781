"""Proof that a program does what its schedule says, by running its tables on symbols.

Places hold numbers that represent values, and `schedules.lowering.check_values` lists the values
that each action must read and write. The proof shares the table of kinds with the lowering, but no
code. C is the number of channels of a slot.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, NoReturn

import numpy as np

from schedules.core.action import Action, action_of
from schedules.core.check import check
from schedules.lowering.check_tables import Place, check_tables, fail, stage_of
from schedules.lowering.check_values import GRADIENT, OUTPUT, WHAT, SymbolicValues
from schedules.lowering.kinds import ValueKind
from schedules.lowering.program import Channel, Op, Program


def check_program(program: Program, *, ascending: bool = False) -> Program:
    """Return the program if it runs exactly its schedule.

    The proof shows: the tables are well formed. Every rank runs its actions once, in its order.
    Every action reads exactly its operands. A value stays in place until its last reader, in the
    memory (of the device or of the host) that both its writer and its readers name. Whole weights
    and gradients of a chunk are in their windows, if there are any. No value is stored that no
    action reads. Slices find the carries of earlier slices and complete gradients of their own
    carries.

    Args:
      program: any program.
      ascending: whether to prove also that every stage accumulates its weight gradients in
        ascending microbatch order, as all built-in families do, so that their results are bitwise
        equal.

    Raises:
      ScheduleError: the first fault, with its tick, slot, rank and action, and the expected and the
        found value.
    """
    check(program.schedule)
    check_tables(program)
    if ascending:
        _check_ascending(program)
    _Machine(program).run()
    return program


class _Entry(NamedTuple):
    """The places of a kind of values that actions name; for carries, the places of one slice.

    Attributes:
      slice: the number of the slice; 0 for a kind with one place.
      table: [T][slots][S] the places.
      values: [S] the current values, by place.
    """

    kind: ValueKind
    slice: int
    table: list[list[list[int]]]
    values: list[dict[int, int]]
    discard: int


class _Machine:
    """The ranks of a program, run on symbols. Values are numbers; -1 means no value."""

    def __init__(self, program: Program) -> None:
        schedule = program.schedule
        self.program, self.values = program, SymbolicValues(program)
        self.name = self.values.name
        self.common = Common(program, self.values)
        self.microbatch = program.microbatch.tolist()
        # [T, slots, C, S], and for each slot [C, S] the rank that sends to each rank; -1 is none.
        self.arrival = np.moveaxis(program.arrival, 3, 2).tolist()
        self.sources = [
            [_sources(c, schedule.num_ranks) for c in s.channels] for s in program.slots
        ]
        # [S] lists of the remaining actions, the last first, with the values that they must read.
        self.due = [
            [(a, self.values.reads(a)) for a in reversed(order)] for order in schedule.orders
        ]
        # [S] number of remaining actions that read each value.
        self.unread = [
            Counter(value for _, values in due for value in values if value >= 0)
            for due in self.due
        ]
        pools: dict[str, list[dict[int, int]]] = {}
        self.entries = []
        for kind, n in self.values.entries:
            table, discard = program.values[kind.name].table, program.values[kind.name].discard
            places = (table[..., n] if kind.per_slice else table).tolist()
            pool = pools.setdefault(kind.pool, [{} for _ in schedule.orders])
            self.entries.append(_Entry(kind, n, places, pool, discard))
        self.operand = self.entries[0]  # all messages use its places
        self.stages: dict[tuple[int, int, int], int] = {}  # by slot, rank and branch
        # [S] the chunk in each window, for weights and for gradients.
        first = program.windows.weights[:1] if program.windows else ()
        self.whole = [dict.fromkeys(first, 0) for _ in schedule.orders]
        self.summed: list[dict[int, int]] = [{} for _ in schedule.orders]

    def run(self) -> None:
        """Run every slot in turn, then check that no action remains."""
        program = self.program
        none = [-1] * (program.schedule.num_ranks + 1)  # the last entry is for source -1
        before = none
        for tick, slots in enumerate(program.op.tolist()):
            for slot, branches in enumerate(slots):
                # The order of a slot: embeddings, actions, heads and their gradients, exchanges.
                results = none.copy()
                self._look_up(tick, slot)
                for rank, branch in enumerate(branches):
                    if branch:
                        results[rank] = self._act((tick, slot, rank), branch)
                self.common.work(tick, slot, results)
                self._exchange(tick, slot, results, before if program.delayed else results)
                before = results
        for rank, due in enumerate(self.due):
            if due:
                fail(
                    program,
                    f"rank {rank}: expected {due[-1][0]} next, found the end of the program",
                )

    def _look_up(self, tick: int, slot: int) -> None:
        """Store the shared embedding before a slot in the place that the first stage reads."""
        microbatch = self.common.tables["lookup"][tick][slot]
        if microbatch >= 0:
            rank = self.program.schedule.placement[0]
            value = self.values.output(microbatch)
            at = (tick, slot, rank)
            if value not in self.unread[rank]:
                fail(self.program, f"{self.name(value)}, which no action reads: expected -1", at)
            self._store(at, self.operand, self.operand.table[tick][slot][rank], value)

    def _act(self, at: Place, branch: int) -> int:
        """Run one action and return the value for the channels."""
        tick, slot, rank = at
        op = self.program.slots[slot].ops[branch - 1]
        if (slot, rank, branch) not in self.stages:
            self.stages[slot, rank, branch] = stage_of(self.program, at)
        stage = self.stages[slot, rank, branch]
        # The action must be the next one in the order of its rank.
        microbatch, due = self.microbatch[tick][slot][rank], self.due[rank]
        action = action_of(stage, op.kind, microbatch, self.program.schedule.num_slices)
        if not due or due[-1][0] != action:
            expected = due[-1][0] if due else "nothing"
            fail(self.program, f"{action}: expected {expected} next in the order of the rank", at)
        action, reads = due.pop()
        # The action must find its operands; a value without a later reader releases its place.
        unread = self.unread[rank]
        writes = [value if value in unread else -1 for value in self.values.writes(action)]
        places = [entry.table[tick][slot][rank] for entry in self.entries]
        for entry, place, value, new in zip(self.entries, places, reads, writes, strict=True):
            if value >= 0:
                values = entry.values[rank]
                if values.get(place) != value:
                    self._fail_read(at, action, entry, value)
                if unread[value] > 1:
                    unread[value] -= 1
                else:
                    del unread[value], values[place]
            elif new < 0 and place != entry.discard:
                self._fail_discard(at, action, entry)
            if entry.kind.can_be_on_host:
                self._check_memory(at, action, op, entry)
        self._check_windows(at, action, op)
        # Only then are the results stored.
        for entry, place, value in zip(self.entries, places, writes, strict=True):
            if value >= 0:
                self._store(at, entry, place, value)
        output = self.values.output(microbatch, stage)
        return {"F": output + OUTPUT, "W": -1}.get(op.kind, output + GRADIENT)

    def _check_windows(self, at: Place, action: Action, op: Op) -> None:
        """Check that an action's weights are whole, and that no window is taken from its chunk."""
        if self.program.windows is None:
            return
        # The action reads one window; its gather fills another window for a later action.
        weights, gradients, *_ = self.program.windows
        whole, summed, jobs = self.whole[at[2]], self.summed[at[2]], dict(op.jobs)
        if whole.get(weights[op.chunk]) != op.chunk:
            there = whole.get(weights[op.chunk], "none")
            text = f"{action} finds the weights of chunk {there} in window {weights[op.chunk]}"
            fail(self.program, f"{text}: expected those of chunk {op.chunk}", at)
        if "gather" in jobs:
            chunk = jobs["gather"]
            if weights[chunk] == weights[op.chunk]:
                text = f"{action} has its weights in the window into which chunk {chunk} is"
                fail(self.program, f"{text} gathered meanwhile: expected another window", at)
            if whole.get(weights[chunk]) == chunk:
                text = f"{action} gathers chunk {chunk}: expected one that is in no window"
                fail(self.program, text, at)
            whole[weights[chunk]] = chunk
        # The action adds to one window of gradients; its reduce empties another window.
        adds = None if op.kind == "F" else gradients[op.chunk]
        if "reduce" in jobs:
            chunk = jobs["reduce"]
            there = summed.pop(gradients[chunk], "none")
            if there != chunk or gradients[chunk] == adds:
                text = f"{action} shares out gradients of chunk {chunk}: expected them in a"
                fail(self.program, f"{text} window it does not add to, found chunk {there}", at)
        if adds is not None and summed.setdefault(adds, op.chunk) != op.chunk:
            text = f"{action} adds to gradients in window {adds}: expected none there, or those of"
            fail(self.program, f"{text} chunk {op.chunk}, found chunk {summed[adds]}", at)

    def _check_memory(self, at: Place, action: Action, op: Op, entry: _Entry) -> None:
        """Check that the op names the memory of an action's place."""
        tick, slot, rank = at
        (name, pool, *_), place, discard = entry.kind, entry.table[tick][slot][rank], entry.discard
        first, on_host = self.program.values[name].device, name in op.host
        if on_host != (first <= place < discard):
            memory = ("the device", "the host")[on_host]
            rule = f"{first}..{discard - 1}" if on_host else f"0..{first - 1} or discard, {discard}"
            text = f"{action} takes its {name} from the memory of {memory}: expected {pool} {rule}"
            fail(self.program, f"{text}, found {pool} {place}", at)

    def _exchange(self, tick: int, slot: int, results: list[int], sent: list[int]) -> None:
        """Store results that stay on their rank, and the messages of a slot's other channels."""
        discard = self.operand.discard
        for column, sources in enumerate(self.sources[slot]):
            places = self.arrival[tick][slot][column]
            shift = self.program.slots[slot].channels[column].shift
            messages = sent if shift else results
            for rank, (place, source) in enumerate(zip(places, sources, strict=True)):
                # Every rank stores what arrives; a message that is not read goes to the discard
                # place.
                value = messages[source]
                if value >= 0 and value in self.unread[rank]:
                    self._store((tick, slot, rank), self.operand, place, value)
                elif place != discard:
                    fail(
                        self.program,
                        f"shift {shift} brings {self.name(value)}, which no action reads: expected "
                        f"discard, buffer {discard}, found buffer {place}",
                        (tick, slot, rank, column),
                    )

    def _store(self, at: Place, entry: _Entry, place: int, value: int) -> None:
        values, pool = entry.values[at[2]], entry.kind.pool
        if place in values or place == entry.discard:
            there = self.name(values[place]) if place in values else "discard"
            text = f"{self.name(value)}: expected a free {pool}, found {pool} {place}: {there}"
            fail(self.program, text, at)
        values[place] = value

    def _fail_read(self, at: Place, action: Action, entry: _Entry, value: int) -> NoReturn:
        (name, pool, *_), (tick, slot, rank) = entry.kind, at
        place = entry.table[tick][slot][rank]
        there = self.name(entry.values[rank].get(place, -1))
        text = f"{action} reads its {name.replace('_', ' ')} from {pool} {place}"
        fail(self.program, f"{text}: expected {self.name(value)}, found {there}", at)

    def _fail_discard(self, at: Place, action: Action, entry: _Entry) -> NoReturn:
        (name, pool, *_), (tick, slot, rank) = entry.kind, at
        text = f"{action} has no {name.replace('_', ' ')}"
        text += f" of slice {entry.slice}" * entry.kind.per_slice
        text += f": expected discard, {pool} {entry.discard}"
        fail(self.program, f"{text}, found {pool} {entry.table[tick][slot][rank]}", at)


class Common:
    """The work that all ranks do together, run on symbols.

    Ranks run the head right after the slot in which the last stage returns an output, and the
    embedding's gradient right after the slot in which the first stage returns its input's gradient.
    """

    def __init__(self, program: Program, values: SymbolicValues) -> None:
        self.program, self._values = program, values
        self.tables = {name: t.tolist() for name, t in program.common._asdict().items()}

    def work(self, tick: int, slot: int, results: list[int]) -> None:
        """Check that all ranks work on a value exactly in the slot that returns it.

        ``results`` [S + 1] has the value that each rank returns in the slot; the last stage's
        output becomes the head's gradient.
        """
        schedule = self.program.schedule
        last = schedule.num_stages - 1
        if self._values.has_head:
            rank = schedule.placement[last]
            output = results[rank] - self._values.output(0, last)
            if self._see("head", "output of the last stage", output, (tick, slot, rank)):
                results[rank] += self._values.output(0, 1) + GRADIENT
        rank = schedule.placement[0]
        gradient = results[rank] - GRADIENT if self._values.has_embed else -1
        self._see("scatter", "gradient of the first stage", gradient, (tick, slot, rank))

    def _see(self, name: str, what: str, value: int, at: Place) -> bool:
        """Check a table against a rank's result; tell whether that is the value of a unit."""
        microbatch, rest = divmod(value, len(WHAT))
        there = not rest and 0 <= microbatch < self.program.schedule.num_units
        wanted = microbatch if there else -1
        entry = self.tables[name][at[0]][at[1]]
        if entry != wanted:
            text = f"of microbatch {wanted} is there" if there else "is not there"
            text = f"the {what} {text}: expected {wanted}, found {entry}"
            fail(self.program, f"table {name!r}, {text}", at)
        return there


def _sources(channel: Channel, num_ranks: int) -> list[int]:
    """Return [S] the rank that sends to each rank along a channel, -1 for none."""
    source_of = {destination: source for source, destination in channel.edges}
    return [source_of.get(rank, -1) for rank in range(num_ranks)]


def _check_ascending(program: Program) -> None:
    latest: dict[int, Action] = {}
    for rank, order in enumerate(program.schedule.orders):
        for action in order:
            if action.kind in ("B", "W"):
                before = latest.get(action.stage)
                if before is not None and before.microbatch > action.microbatch:
                    fail(
                        program,
                        f"rank {rank}: expected ascending microbatches, found {action} "
                        f"after {before}",
                    )
                latest[action.stage] = action
