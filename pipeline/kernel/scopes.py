"""The name scopes of the kernel, and how often what stands in them runs.

Letters: S ranks. What a profile or the HLO shows of a step is named ``ticks0_38/slot1/B0_last``:
in ticks 0..37, in the second slot of each, the backward of the last stage, of chunk 0. Stages that
are not alike put ``stages_0_2`` before it, those that share its code. An action, and what all ranks
do together around a slot, is a loop of at most one trip: the tables say how many a rank makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from schedules.lowering.program import Program

ONCE = "once"  # a loop of exactly one trip
COMMON = ("lookup", "head", "scatter")  # tables of what all ranks do together
_TICKS, _SLOT = re.compile(r"ticks(\d+)_(\d+)"), re.compile(r"slot(\d+)")
_STAGES = re.compile(r"stages((?:_\d+)+)")


def of_ticks(start: int, stop: int) -> str:
    """Ticks start..stop - 1."""
    return f"ticks{start}_{stop}"


def of_slot(index: int) -> str:
    """A slot of every tick."""
    return f"slot{index}"


def of_stages(stages: Iterable[int]) -> str:
    """Stages that share their code."""
    return "_".join(["stages", *map(str, stages)])


def trips(program: Program, scope: str) -> NDArray[np.int64] | None:
    """[S] how many trips each rank makes in a step through a loop of at most one.

    Args:
      program: what runs.
      scope: the name scopes around the loop, joined by slashes.

    Returns:
      None for a loop of which the tables know nothing.
    """
    names = scope.split("/")
    ticks, slot, group = (_last(pattern, names) for pattern in (_TICKS, _SLOT, _STAGES))
    if ticks is None or slot is None:
        return None
    part, index, schedule = slice(*map(int, ticks.groups())), int(slot[1]), program.schedule
    for name in COMMON:
        if name in names:
            count = int((getattr(program, name)[part, index] >= 0).sum())
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
    """The innermost scope of a kind."""
    return next((m for name in reversed(list(names)) if (m := pattern.fullmatch(name))), None)
