"""The name scopes of the kernel, and the number of runs of their contents.

Letters: S ranks. An action is a loop of at most one trip, and so is the work around a slot that all
ranks do together. The tables say how many trips a rank makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.core.autodiff.jaxpr.primitives import equations
from schedules.core.action import Action
from schedules.lowering.program import COMMON, Program

_TICKS, _SLOT = re.compile(r"ticks(\d+)_(\d+)"), re.compile(r"slot(\d+)")
_STAGES = re.compile(r"stages((?:_\d+)+)")
# Parts of `Op.label` for work in addition to an action: copies, and FSDP's collectives.
COPIED = r"(?:_stash)?(?:_crossing)?"
MOVED = r"(?:_gathers\d+)?(?:_reduces\d+)?"
PLACE = re.compile(  # of an action: first tick, last tick, slot, stages, label
    rf"{_TICKS.pattern}/(?:.*/)?{_SLOT.pattern}/(?:{_STAGES.pattern}/)?"
    rf"([FBIW]\d+(?:_first)?(?:_last)?{COPIED}{MOVED}|{'|'.join(COMMON)})"
)


class Place(NamedTuple):
    """Place of a loop of at most one trip in a program.

    Attributes:
      start: the first tick in which the loop runs.
      stop: the tick after the last tick in which the loop runs.
      slot: the loop's slot in each of these ticks.
      label: `Op.label`, or one of `COMMON`.
      stages: the stages that share the loop's code, if stages are not alike.
    """

    start: int
    stop: int
    slot: int
    label: str
    stages: tuple[int, ...] | None

    def actions(self, program: Program, rank: int) -> Iterator[tuple[int, Action | None]]:
        """Yield (tick, action) of every trip of a rank; None for work of all ranks together."""
        ticks = range(self.start, self.stop)
        if self.label in COMMON:
            table = getattr(program.common, self.label)
            yield from ((tick, None) for tick in ticks if table[tick, self.slot] >= 0)
            return
        branches = dict(enumerate(program.slots[self.slot].ops, start=1))
        for tick in ticks:
            op = branches.get(int(program.op[tick, self.slot, rank]))
            if op is None or op.label != self.label:
                continue
            stage = program.schedule.stages_of[rank][op.chunk]
            if self.stages is None or stage in self.stages:
                microbatch = int(program.microbatch[tick, self.slot, rank])
                yield tick, Action(stage, op.kind, microbatch)


def place_of_loop(scope: str) -> Place | None:
    """Find a loop's place from the name scopes at its end; None for any other loop."""
    around, _, last = scope.rpartition("/")
    found = PLACE.search(around) if last == "while" else None
    if found is None or found.end() != len(around):
        return None
    start, stop, slot, stages, label = found.groups()
    numbers = tuple(map(int, stages.strip("_").split("_"))) if stages else None
    return Place(int(start), int(stop), int(slot), label, numbers)


def trips(program: Program, scope: str) -> NDArray[np.int64] | None:
    """Count [S] the trips of each rank in a step through a loop of at most one trip.

    Args:
      scope: the name scopes around the loop, joined by slashes.

    Returns:
      None for a loop that the tables do not contain.
    """
    names = scope.split("/")
    ticks, slot, group = (_last(pattern, names) for pattern in (_TICKS, _SLOT, _STAGES))
    if ticks is None or slot is None:
        return None
    part, index, schedule = slice(*map(int, ticks.groups())), int(slot[1]), program.schedule
    for name in COMMON:
        if name in names:
            count = int((getattr(program.common, name)[part, index] >= 0).sum())
            return np.full(schedule.num_ranks, count, np.int64)
    for branch, op in enumerate(program.slots[index].ops, start=1):
        if op.label in names:
            found = (program.op[part, index] == branch).sum(axis=0)
            if group is not None:
                alike = set(map(int, group[1].strip("_").split("_")))
                found = found * [held[op.chunk] in alike for held in schedule.stages_of]
            return np.asarray(found, np.int64)
    return None


def _last(pattern: re.Pattern[str], names: Iterable[str]) -> re.Match[str] | None:
    """Return the match of the innermost scope of a kind."""
    return next((m for name in reversed(list(names)) if (m := pattern.fullmatch(name))), None)


def find_shard_map(jaxpr: Any) -> Any:
    """Return the body of a jaxpr's ``shard_map``, which each device runs; None if it has none."""
    found = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")
    return next((eqn.params["jaxpr"] for eqn in found), None)
