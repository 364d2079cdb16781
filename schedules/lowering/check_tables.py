"""Checks of a program's tables without running them: shapes, ranges, permutations.

Letters as in `schedules.core.action`, C as in `schedules.lowering.program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, get_args

import numpy as np

from schedules.clocks.hosted import Keep
from schedules.core.action import KINDS, ScheduleError
from schedules.lowering.program import CARRIED, COMMON, Op, Program

Place = tuple[int, int, int]  # tick, slot, rank


def fail(program: Program, text: str, at: Sequence[int] = ()) -> NoReturn:
    """Raise for a fault, at (tick, slot, rank) or in the program as a whole."""
    names = ("tick", "slot", "rank", "channel")[: len(at)]
    where = ", ".join(f"{name} {n}" for name, n in zip(names, at, strict=True))
    raise ScheduleError(
        f"program of schedule {program.schedule.name!r}: {where}{': ' if where else ''}{text}; "
        f"this program would compute something else, so lower the schedule again"
    )


def check_tables(program: Program) -> None:
    """Raise a ScheduleError unless the tables are well formed."""
    if program.keep not in get_args(Keep):
        fail(program, f"keep={program.keep!r}: expected one of {', '.join(get_args(Keep))}")
    _check_shapes(program)
    for slot in range(len(program.slots)):
        _check_ops(program, slot)
        _check_channels(program, slot)
    _check_ranges(program)
    _check_idle(program)


def _check_shapes(program: Program) -> None:
    """[T, slots, S] each, and [T, slots, S, C]; integers. A window for each chunk, or none."""
    num_chunks = len(program.schedule.stages_of[0])
    windows = len(program.weights), len(program.gradients)
    if windows not in ((0, 0), (num_chunks, num_chunks)):
        text = f"{windows[0]} windows of weights and {windows[1]} of gradients: expected one"
        fail(program, f"{text} of both for each of {num_chunks} chunks, or none")
    shape = (program.op.shape[0], len(program.slots), program.schedule.num_ranks)
    num_channels = max((len(slot.channels) for slot in program.slots), default=0)
    own = ("op", "microbatch", "operand", "gradient", "stash", "crossing")
    expected_of: dict[str, tuple[int, ...]] = dict.fromkeys(own, shape)
    expected_of |= dict.fromkeys(COMMON, shape[:2]) | {"arrival": (*shape, num_channels)}
    slices = program.schedule.num_slices
    expected_of |= dict.fromkeys(CARRIED, (*shape, slices) if slices > 1 else (0, 0, 0, 0))
    for name, expected in expected_of.items():
        table = getattr(program, name)
        if table.shape != expected or table.dtype != np.int32:
            fail(
                program,
                f"table {name!r}: expected int32 of shape {expected}, found {table.dtype} of "
                f"shape {table.shape}",
            )


def _check_ops(program: Program, slot: int) -> None:
    kinds, ops, _ = program.slots[slot]
    num_chunks = len(program.schedule.stages_of[0])
    for op in ops:
        if op.kind not in KINDS or op.kind not in kinds or not 0 <= op.chunk < num_chunks:
            fail(
                program,
                f"slot {slot} has {op}: expected kinds {kinds!r} and chunks 0..{num_chunks - 1}",
            )
        most = num_chunks - 1 if program.weights else -1
        if not all(-1 <= chunk <= most for chunk in (op.gathers, op.reduces)):
            chunks = f"-1 or a chunk, 0..{most}" if program.weights else "-1: there are no windows"
            fail(program, f"slot {slot} has {op}: expected of gathers and reduces {chunks}")


def _check_channels(program: Program, slot: int) -> None:
    """Every channel a permutation by its shift, every shift once."""
    num_ranks = program.schedule.num_ranks
    channels = program.slots[slot].channels
    shifts = [channel.shift for channel in channels]
    if len(set(shifts)) < len(shifts):
        fail(program, f"slot {slot} has channels of shifts {shifts}: expected each shift once")
    for shift, edges in channels:
        ends = [rank for edge in edges for rank in edge]
        is_permutation = all(len(set(side)) == len(edges) for side in (ends[::2], ends[1::2]))
        is_inside = all(0 <= rank < num_ranks for rank in ends)
        if not is_permutation or not is_inside:
            fail(
                program,
                f"slot {slot} has the channel {edges}: expected each rank of 0..{num_ranks - 1} at "
                f"most once as source and once as destination",
            )
        for source, destination in edges:
            if (destination - source) % num_ranks != shift:
                fail(
                    program,
                    f"slot {slot} has the edge {source} -> {destination} in the channel of shift "
                    f"{shift}: expected shift {(destination - source) % num_ranks}",
                )


def _check_ranges(program: Program) -> None:
    num_ops = np.array([len(slot.ops) for slot in program.slots])
    largest = {
        "op": num_ops[None, :, None],
        "microbatch": program.schedule.num_units - 1,
        **program.trash,
        **dict.fromkeys(COMMON, program.schedule.num_units - 1),
    }
    for name, most in largest.items():
        table, least = getattr(program, name), -1 if name in COMMON else 0
        outside = np.argwhere((table < least) | (table > most))
        if len(outside):
            at = tuple(outside[0].tolist())
            limit = int(np.broadcast_to(np.asarray(most), table.shape)[at])
            fail(program, f"table {name!r}: expected {least}..{limit}, found {table[at]}", at)


def _check_idle(program: Program) -> None:
    """Idle ranks point at nothing; columns beyond a slot's channels are trash."""
    idle = program.op == 0
    nothing = {"microbatch": 0, **program.trash}
    for name in ("arrival", *CARRIED):
        nothing.pop(name)
    for name, value in nothing.items():
        wrong = np.argwhere(idle & (getattr(program, name) != value))
        if len(wrong):
            at = tuple(wrong[0].tolist())
            found = getattr(program, name)[at]
            fail(program, f"idle, table {name!r}: expected {value}, found {found}", at)
    for slot, (_, _, channels) in enumerate(program.slots):
        wrong = np.argwhere(program.arrival[:, slot, :, len(channels) :] != program.num_buffers)
        if len(wrong):
            tick, rank, column = wrong[0].tolist()
            at = (tick, slot, rank, len(channels) + column)
            fail(
                program,
                f"the slot has {len(channels)} channels: expected trash, buffer "
                f"{program.num_buffers}, found buffer {program.arrival[at]}",
                at,
            )


def stage_of(program: Program, at: Place) -> int:
    """The stage of the op that runs at a place."""
    op: Op = program.slots[at[1]].ops[program.op[at] - 1]
    schedule = program.schedule
    stage = schedule.stages_of[at[2]][op.chunk]
    ends = program.ends_of(stage)
    if (op.first, op.last) != ends:
        fail(
            program,
            f"{op} runs stage {stage} of {schedule.num_stages}: expected first={ends[0]}, "
            f"last={ends[1]}",
            at,
        )
    return stage
