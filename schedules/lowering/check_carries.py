"""Proof that the places of carries and of their gradients do what slices need.

Nothing is shared with `schedules.lowering.carries`: the tables are run on symbols, rank by rank.
A value is (stage, microbatch, slice); N slices.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from schedules.lowering.check_tables import Place, fail, stage_of
from schedules.lowering.program import Program

Value = tuple[int, int, int]
_TEXT = {"carry": "the carry of", "carry_gradient": "the gradient of the carry of"}


def check_carries(program: Program) -> None:
    """See that every action finds the carries of earlier slices, and gradients are complete.

    Raises:
      ScheduleError: the first fault.
    """
    if program.schedule.num_slices > 1:
        for rank in range(program.schedule.num_ranks):
            _CarriesOfRank(program, rank).run()


class _CarriesOfRank:
    """The two pools of one rank, and how many reads of each carry are left."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.N = program.schedule.num_slices
        self.held: dict[str, dict[int, Value]] = {name: {} for name in _TEXT}
        kinds = {action.kind for action in program.schedule.orders[rank]}
        self.passes = 2 if kinds & {"B", "I"} else 1
        self.left: dict[Value, int] = {}

    def run(self) -> None:
        """Every action in turn."""
        program, rank = self.program, self.rank
        for name in _TEXT:
            wrong = getattr(program, name)[:, :, rank] != program.trash[name]
            wrong &= program.op[:, :, rank, None] == 0
            for tick, slot, _ in np.argwhere(wrong)[:1].tolist():
                found = getattr(program, name)[tick, slot, rank].tolist()
                fail(
                    program,
                    f"idle, table {name!r}: expected {program.trash[name]}, found {found}",
                    (tick, slot, rank),
                )
        for tick, slot in np.argwhere(program.op[:, :, rank] > 0).tolist():
            at = tick, slot, rank
            kind = program.slots[slot].ops[program.op[at] - 1].kind
            unit = int(program.microbatch[at])
            own = stage_of(program, at), *divmod(unit, self.N)
            places = {name: getattr(program, name)[at].tolist() for name in _TEXT}
            self._carries(at, kind, own, places["carry"])
            self._gradients(at, kind, own, places["carry_gradient"])
        for name, held in self.held.items():
            for place, value in held.items():
                fail(program, f"rank {rank}: {_name(name, value)} in {name} {place} is never read")

    def _carries(self, at: Place, kind: str, own: Value, places: list[int]) -> None:
        stage, microbatch, part = own
        for n, place in enumerate(places):
            value = stage, microbatch, n
            if kind != "W" and n < part:
                self._read(at, "carry", place, value)
                self.left[value] -= 1
                if not self.left[value]:
                    del self.held["carry"][place]
            elif kind == "F" and n == part < self.N - 1:
                self._store(at, "carry", place, value)
                self.left[value] = self.passes * (self.N - 1 - n)
            else:
                self._trash(at, "carry", place, value)

    def _gradients(self, at: Place, kind: str, own: Value, places: list[int]) -> None:
        stage, microbatch, part = own
        for n, place in enumerate(places):
            value = stage, microbatch, n
            if kind not in "BI" or n > part or n == self.N - 1:
                self._trash(at, "carry_gradient", place, value)
            elif part == self.N - 1:
                self._store(at, "carry_gradient", place, value)
            else:
                self._read(at, "carry_gradient", place, value)
                if n == part:
                    del self.held["carry_gradient"][place]

    def _read(self, at: Place, name: str, place: int, value: Value) -> None:
        found = self.held[name].get(place)
        if found != value:
            self._fail(at, name, place, _name(name, value), found)

    def _store(self, at: Place, name: str, place: int, value: Value) -> None:
        if place in self.held[name] or place == self.program.trash[name]:
            expected = f"a free place for {_name(name, value)}"
            self._fail(at, name, place, expected, self.held[name].get(place))
        self.held[name][place] = value

    def _trash(self, at: Place, name: str, place: int, value: Value) -> None:
        trash = self.program.trash[name]
        if place != trash:
            expected = f"trash, {trash}, for {_name(name, value)}"
            self._fail(at, name, place, expected, self.held[name].get(place))

    def _fail(
        self, at: Place, name: str, place: int, expected: str, found: Value | None
    ) -> NoReturn:
        text = _name(name, found) if found else "nothing"
        fail(self.program, f"table {name!r}: expected {expected}, found {name} {place}: {text}", at)


def _name(name: str, value: Value) -> str:
    stage, microbatch, part = value
    return f"{_TEXT[name]} stage {stage} for microbatch {microbatch}, slice {part}"
