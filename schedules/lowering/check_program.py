"""Run a program's tables on symbols and prove that they do what the schedule says.

Buffers and stashes hold numbers that stand for values. What each action must read follows from
`schedules.lowering.program` alone: no code is shared with the lowering. Letters as in
`schedules.core.action`, C as in `schedules.lowering.program`.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import numpy as np

from schedules.checks.check import check
from schedules.core.action import Action, Kind, action_of
from schedules.lowering.check_carries import check_carries
from schedules.lowering.check_tables import Place, check_tables, fail, stage_of
from schedules.lowering.check_together import Common
from schedules.lowering.check_values import CROSSING, GRADIENT, OUTPUT, RESIDUALS, SymbolicValues
from schedules.lowering.program import Channel, Op, Program

POOLS = {  # by table column
    "operand": "buffer",
    "gradient": "buffer",
    "stash": "stash",
    "crossing": "crossing",
}
LEAVES = {"F": ("stash", RESIDUALS), "I": ("crossing", CROSSING)}  # what an action keeps, and where
COLUMNS = tuple(POOLS.items())


def check_program(program: Program, *, ascending: bool = False) -> Program:
    """Return the program if it runs its schedule, the whole schedule and nothing else.

    Proved: the tables are well formed; every rank runs its actions once, in its order; every
    action reads exactly its operands; a value stays in place until its last reader, in the memory
    (of the device or of the host) that both its writer and its readers name; whole weights and
    gradients of a chunk are in their windows, where there are any; nothing is stored that nobody
    reads; and slices find the carries of earlier ones and complete gradients of their own.

    Args:
      program: any program.
      ascending: prove also that every stage accumulates its weight gradients in ascending
        microbatch order, as all built-in families do, so that their results agree bit for bit.

    Raises:
      ScheduleError: the first fault, with its tick, slot, rank and action, what was expected
        and what was found.
    """
    check(program.schedule)
    check_tables(program)
    if ascending:
        _check_ascending(program)
    _Machine(program).run()
    check_carries(program)
    return program


class _Machine:
    """The ranks of a program, run symbolically. SymbolicValues are numbers; -1 is none."""

    def __init__(self, program: Program) -> None:
        schedule = program.schedule
        self.program, self.values = program, SymbolicValues(program)
        self.name = self.values.name
        self.common = Common(program, self.values)
        self.trash = {pool: program.trash[column] for column, pool in POOLS.items()}
        # The first place of each pool that lies in host memory.
        self.first_on_host = {"stash": program.num_stashes, "crossing": program.num_crossings}
        self.tables = {name: getattr(program, name).tolist() for name in (*POOLS, "microbatch")}
        # [T, slots, C, S], and for each slot [C, S] the rank that sends to each; -1 is none.
        self.arrival = np.moveaxis(program.arrival, 3, 2).tolist()
        self.sources = [
            [_sources(c, schedule.num_ranks) for c in s.channels] for s in program.slots
        ]
        # [S] lists: what is left to do, last first, and what it must read.
        self.due = [
            [(a, self.values.reads(a)) for a in reversed(order)] for order in schedule.orders
        ]
        # [S] how many actions have yet to read each value; the values held, by place.
        self.unread = [
            Counter(value for _, values in due for value in values if value >= 0)
            for due in self.due
        ]
        self.held: dict[str, list[dict[int, int]]] = {
            pool: [{} for _ in schedule.orders] for pool in self.trash
        }
        self.runs: dict[tuple[int, int, int], tuple[int, Kind]] = {}  # slot, rank, branch
        # [S] the chunk in each window, of weights and of gradients.
        self.whole = [dict.fromkeys(program.weights[:1], 0) for _ in schedule.orders]
        self.summed: list[dict[int, int]] = [{} for _ in schedule.orders]

    def run(self) -> None:
        """Every slot in turn, then see that nothing is left to do."""
        program = self.program
        none = [-1] * (program.schedule.num_ranks + 1)  # the last is what source -1 sends
        before = none
        for tick, slots in enumerate(program.op.tolist()):
            for slot, branches in enumerate(slots):
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
        """Store what all ranks embed before a slot where the first stage's rank reads."""
        microbatch = self.common.tables["lookup"][tick][slot]
        if microbatch >= 0:
            rank = self.program.schedule.placement[0]
            value = self.values.output(microbatch)
            at = (tick, slot, rank)
            if value not in self.unread[rank]:
                fail(self.program, f"{self.name(value)}, which nobody reads: expected -1", at)
            place = self.tables["operand"][tick][slot][rank]
            self._store(at, "buffer", place, value)

    def _act(self, at: Place, branch: int) -> int:
        """Run one action; what it offers to the channels."""
        tick, slot, rank = at
        if (slot, rank, branch) not in self.runs:
            op = self.program.slots[slot].ops[branch - 1]
            self.runs[slot, rank, branch] = stage_of(self.program, at), op.kind
        stage, kind = self.runs[slot, rank, branch]
        microbatch = self.tables["microbatch"][tick][slot][rank]
        due = self.due[rank]
        found = action_of(stage, kind, microbatch, self.program.schedule.num_slices)
        if not due or due[-1][0] != found:
            self._fail_order(at, found)
        action, values = due.pop()
        unread = self.unread[rank]
        own = self.values.output(microbatch, stage)
        store, kept = LEAVES.get(kind, ("", OUTPUT))
        keeps = bool(store) and own + kept in unread
        for (column, pool), value in zip(COLUMNS, values, strict=True):
            place = self.tables[column][tick][slot][rank]
            if value >= 0:
                held = self.held[pool][rank]
                if held.get(place) != value:
                    self._fail_read(at, action, column, value)
                if unread[value] > 1:
                    unread[value] -= 1
                else:
                    del unread[value], held[place]
            elif place != self.trash[pool] and not (keeps and pool == store):
                self._fail_trash(at, action, column)
        self._check_memory(at, action, self.program.slots[slot].ops[branch - 1])
        self._check_windows(at, action, self.program.slots[slot].ops[branch - 1])
        if keeps:
            self._store(at, store, self.tables[store][tick][slot][rank], own + kept)
        return {"F": own + OUTPUT, "W": -1}.get(kind, own + GRADIENT)

    def _check_windows(self, at: Place, action: Action, op: Op) -> None:
        """See that an action's weights are whole, and that no window is taken from its chunk."""
        weights, gradients = self.program.weights, self.program.gradients
        if not weights:
            return
        whole, summed = self.whole[at[2]], self.summed[at[2]]
        if whole.get(weights[op.chunk]) != op.chunk:
            there = whole.get(weights[op.chunk], "none")
            text = f"{action} finds the weights of chunk {there} in window {weights[op.chunk]}"
            fail(self.program, f"{text}: expected those of chunk {op.chunk}", at)
        if op.gathers >= 0:
            if weights[op.gathers] == weights[op.chunk]:
                text = f"{action} has its weights in the window into which chunk {op.gathers} is"
                fail(self.program, f"{text} gathered meanwhile: expected another window", at)
            if whole.get(weights[op.gathers]) == op.gathers:
                text = f"{action} gathers chunk {op.gathers}: expected one that is in no window"
                fail(self.program, text, at)
            whole[weights[op.gathers]] = op.gathers
        adds = None if op.kind == "F" else gradients[op.chunk]
        if op.reduces >= 0:
            found = summed.pop(gradients[op.reduces], "none")
            if found != op.reduces or gradients[op.reduces] == adds:
                text = f"{action} shares out gradients of chunk {op.reduces}: expected them in a"
                fail(self.program, f"{text} window it does not add to, found chunk {found}", at)
        if adds is not None and summed.setdefault(adds, op.chunk) != op.chunk:
            text = f"{action} adds to gradients in window {adds}: expected none there, or those of"
            fail(self.program, f"{text} chunk {op.chunk}, found chunk {summed[adds]}", at)

    def _check_memory(self, at: Place, action: Action, op: Op) -> None:
        """See that the places of an action lie in the memory that its op names."""
        for pool, wanted in (("stash", op.stash_on_host), ("crossing", op.crossing_on_host)):
            place = int(getattr(self.program, pool)[at])
            is_used = place != self.trash[pool]
            if wanted != (is_used and place >= self.first_on_host[pool]):
                memory = ("the device", "the host")[wanted]
                first, trash = self.first_on_host[pool], self.trash[pool]
                rule = f"{first}..{trash - 1}" if wanted else f"0..{first - 1} or trash, {trash}"
                text = f"{action} takes its {pool} from the memory of {memory}: expected {pool} "
                fail(self.program, f"{text}{rule}, found {pool} {place}", at)

    def _exchange(self, tick: int, slot: int, kept: list[int], sent: list[int]) -> None:
        """Store what stays on its rank, and what is sent along the other channels of a slot."""
        trash = self.trash["buffer"]
        for column, sources in enumerate(self.sources[slot]):
            places = self.arrival[tick][slot][column]
            shift = self.program.slots[slot].channels[column].shift
            results = sent if shift else kept
            for rank, (place, source) in enumerate(zip(places, sources, strict=True)):
                value = results[source]
                if value >= 0 and value in self.unread[rank]:
                    self._store((tick, slot, rank), "buffer", place, value)
                elif place != trash:
                    fail(
                        self.program,
                        f"shift {shift} brings {self.name(value)}, which nobody reads: "
                        f"expected trash, buffer {trash}, found buffer {place}",
                        (tick, slot, rank, column),
                    )

    def _store(self, at: Place, pool: str, place: int, value: int) -> None:
        held = self.held[pool][at[2]]
        if place in held or place == self.trash[pool]:
            found = self.name(held[place]) if place in held else "trash"
            text = f"{self.name(value)}: expected a free {pool}, found {pool} {place}: {found}"
            fail(self.program, text, at)
        held[place] = value

    def _fail_order(self, at: Place, action: Action) -> NoReturn:
        due = self.due[at[2]]
        expected = due[-1][0] if due else "nothing"
        fail(self.program, f"{action}: expected {expected} next in the order of the rank", at)

    def _fail_read(self, at: Place, action: Action, column: str, value: int) -> NoReturn:
        pool, place = POOLS[column], int(getattr(self.program, column)[at])
        found = self.name(self.held[pool][at[2]].get(place, -1))
        fail(
            self.program,
            f"{action} reads its {column} from {pool} {place}: expected {self.name(value)}, "
            f"found {found}",
            at,
        )

    def _fail_trash(self, at: Place, action: Action, column: str) -> NoReturn:
        pool = POOLS[column]
        fail(
            self.program,
            f"{action} has no {column}: expected trash, {pool} {self.trash[pool]}, found {pool} "
            f"{getattr(self.program, column)[at]}",
            at,
        )


def _sources(channel: Channel, num_ranks: int) -> list[int]:
    """[S] the rank that sends to each along a channel, -1 for none."""
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
