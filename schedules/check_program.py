"""Run a program's tables on symbols and prove that they do what the schedule says.

Buffers and stashes hold names of values instead of arrays. What each action must read follows
from `schedules.program` alone: no code is shared with the lowering. Letters as in `schedules.ir`,
C as in `schedules.program`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from schedules.check import check
from schedules.check_tables import Place, check_tables, fail, stage_of
from schedules.ir import Action
from schedules.program import Program


class Value(NamedTuple):
    """The name of what a buffer or a stash holds."""

    what: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.what} of stage {self.stage} for microbatch {self.microbatch}"


OUTPUT, GRADIENT, RESIDUALS = "output", "input gradient", "residuals"


def check_program(program: Program, *, ascending: bool = False) -> Program:
    """Return the program if it runs its schedule, the whole schedule and nothing else.

    Proved: the tables are well formed; every rank runs its actions once, in its order; every
    action reads exactly its operands; a value stays in place until its last reader; and nothing
    is stored that nobody reads.

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
    return program


def reads(program: Program, action: Action) -> dict[str, Value | None]:
    """What each table column must point an action at; None: at trash."""
    stage, kind, microbatch = action
    is_backward, is_last = kind != "F", stage == program.schedule.num_stages - 1
    values: dict[str, Value | None] = dict.fromkeys(("operand", "gradient", "stash"))
    if stage > 0 and (not is_backward or program.keep == "input"):
        values["operand"] = Value(OUTPUT, stage - 1, microbatch)
    if is_backward and not is_last:
        values["gradient"] = Value(GRADIENT, stage + 1, microbatch)
    if program.keep == "residuals" and is_backward:
        values["stash"] = Value(RESIDUALS, stage, microbatch)
        if is_last:
            values["gradient"] = Value(OUTPUT, stage, microbatch)
    return values


class _Machine:
    """The ranks of a program, run symbolically."""

    def __init__(self, program: Program) -> None:
        schedule = program.schedule
        self.program = program
        self.position = [0] * schedule.num_ranks
        # (rank, column, place) -> what is held there until its last reader; pools are columns.
        self.held: dict[tuple[int, str, int], Value] = {}
        self.unread = Counter(  # (rank, value) -> how many actions have yet to read it
            (rank, value)
            for rank, order in enumerate(schedule.orders)
            for action in order
            for value in reads(program, action).values()
            if value is not None
        )
        self.trash = {"buffer": program.num_buffers, "stash": program.num_stashes}

    def run(self) -> None:
        """Every slot in turn, then see that nothing is left to do."""
        program = self.program
        busy = (program.op > 0).tolist()
        for tick, slot in np.ndindex(program.op.shape[:2]):
            results: dict[int, Value] = {}
            for rank, acts in enumerate(busy[tick][slot]):
                if acts:
                    value = self._act((tick, slot, rank))
                    if value is not None:
                        results[rank] = value
            self._exchange(tick, slot, results)
        for rank, order in enumerate(program.schedule.orders):
            if self.position[rank] < len(order):
                due = order[self.position[rank]]
                fail(program, f"rank {rank}: expected {due} next, found the end of the program")

    def _act(self, at: Place) -> Value | None:
        """Run one action; what it offers to the channels."""
        program, rank = self.program, at[2]
        kind = program.slots[at[1]].ops[program.op[at] - 1].kind
        action = Action(stage_of(program, at), kind, int(program.microbatch[at]))
        order = program.schedule.orders[rank]
        due = order[self.position[rank]] if self.position[rank] < len(order) else "nothing"
        if action != due:
            fail(program, f"{action}: expected {due} next in the order of the rank", at)
        self.position[rank] += 1
        for column, value in reads(program, action).items():
            self._read(at, action, column, value)
        kept = Value(RESIDUALS, action.stage, action.microbatch)
        if kind == "F" and self.unread[rank, kept]:
            self._store(at, "stash", int(program.stash[at]), kept)
        what = {"F": OUTPUT, "B": GRADIENT, "I": GRADIENT, "W": None}[kind]
        return None if what is None else Value(what, action.stage, action.microbatch)

    def _read(self, at: Place, action: Action, column: str, value: Value | None) -> None:
        """See that a table column points an action at what it reads."""
        program, rank = self.program, at[2]
        place = int(getattr(program, column)[at])
        pool = "stash" if column == "stash" else "buffer"
        if value is None:
            written = Value(RESIDUALS, action.stage, action.microbatch)
            is_write = column == "stash" and self.unread[rank, written] > 0
            if place != self.trash[pool] and not is_write:
                fail(
                    program,
                    f"{action} has no {column}: expected trash, {pool} {self.trash[pool]}, found "
                    f"{pool} {place}",
                    at,
                )
            return
        found = self.held.get((rank, pool, place), "nothing")
        if found != value:
            fail(
                program,
                f"{action} reads its {column} from {pool} {place}: expected {value}, found {found}",
                at,
            )
        self.unread[rank, value] -= 1
        if not self.unread[rank, value]:
            del self.held[rank, pool, place]

    def _exchange(self, tick: int, slot: int, results: dict[int, Value]) -> None:
        """Move results along every channel of a slot, then store them."""
        program, trash = self.program, self.program.num_buffers
        for column, channel in enumerate(program.slots[slot].channels):
            source_of = {destination: source for source, destination in channel.edges}
            for rank, place in enumerate(program.arrival[tick, slot, :, column].tolist()):
                value = results.get(source_of.get(rank, -1))
                if value is not None and self.unread[rank, value]:
                    self._store((tick, slot, rank), "buffer", place, value)
                elif place != trash:
                    fail(
                        program,
                        f"shift {channel.shift} brings {value or 'nothing'}, which nobody reads: "
                        f"expected trash, buffer {trash}, found buffer {place}",
                        (tick, slot, rank, column),
                    )

    def _store(self, at: Place, pool: str, place: int, value: Value) -> None:
        key = at[2], pool, place
        found = "trash" if place == self.trash[pool] else self.held.get(key)
        if found is not None:
            fail(
                self.program, f"{value}: expected a free {pool}, found {pool} {place}: {found}", at
            )
        self.held[key] = value


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
