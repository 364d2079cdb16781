"""Checks of a program's tables without running them: shapes, ranges, permutations.

C is the number of channels of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, get_args

import numpy as np

from schedules.clocks.hosted import Keep
from schedules.core.action import KINDS, ScheduleError
from schedules.lowering.kinds import HOSTABLE, kinds_of
from schedules.lowering.program import COMMON, JOBS, Op, Program

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
    """Raise a ScheduleError if a table has the wrong shape or dtype, or a count does not fit.

    Windows, if there are any, name one of weights and one of gradients for each chunk. Every value
    kind of `schedules.lowering.kinds` has its numbers of places, and kinds of one pool have equal
    numbers. Each table is an int32 array [T, slots, S, ...], or [T, slots] for work that all ranks
    do together.
    """
    num_chunks, slices = len(program.schedule.stages_of[0]), program.schedule.num_slices
    if program.windows is not None:
        windows = len(program.windows.weights), len(program.windows.gradients)
        if windows != (num_chunks, num_chunks):
            text = f"{windows[0]} windows of weights and {windows[1]} of gradients: expected one"
            fail(program, f"{text} of both for each of {num_chunks} chunks, or none")
    # Kinds of one pool must have equal counts of places, or place numbers would be ambiguous.
    kinds = kinds_of(slices)
    names = [kind.name for kind in kinds]
    if set(program.values) != set(names):
        text = f"expected {', '.join(names)}, found {', '.join(program.values) or 'none'}"
        fail(program, f"placements of values: {text}")
    counts: dict[str, tuple[int, int]] = {}
    for kind in kinds:
        _, device, host = program.values[kind.name]
        expected = counts.setdefault(kind.pool, (device, host if kind.can_be_on_host else 0))
        if (device, host) != expected:
            text = f"expected {expected[0]} and {expected[1]}, found {device} and {host}"
            fail(program, f"places of {kind.name!r} on the device and on the host: {text}")
    # The table of ops determines the number of ticks.
    shape = (program.op.shape[0], len(program.slots), program.schedule.num_ranks)
    num_channels = max((len(slot.channels) for slot in program.slots), default=0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("op", "microbatch"), shape)
    shapes |= {kind.name: (*shape, slices) if kind.per_slice else shape for kind in kinds}
    shapes |= dict.fromkeys(COMMON, shape[:2]) | {"arrival": (*shape, num_channels)}
    tables = program.rank_tables | program.common._asdict()
    for name, wanted in shapes.items():
        table = tables[name]
        if table.shape != wanted or table.dtype != np.int32:
            fail(
                program,
                f"table {name!r}: expected int32 of shape {wanted}, found {table.dtype} of "
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
        # An op has each name at most once and in a fixed order, because its label must be unique.
        if op.host != tuple(name for name in HOSTABLE if name in op.host):
            rule = f"expected of host {', '.join(HOSTABLE)} in this order"
            fail(program, f"slot {slot} has {op}: {rule}")
        jobs = dict(op.jobs)
        if program.windows is None:
            is_legal, rule = not op.jobs, "no jobs: there are no windows"
        else:
            is_legal = [name for name, _ in op.jobs] == [name for name in JOBS if name in jobs]
            is_legal = is_legal and all(0 <= chunk < num_chunks for chunk in jobs.values())
            rule = f"at most one gather, then one reduce, of chunks 0..{num_chunks - 1}"
        if not is_legal:
            fail(program, f"slot {slot} has {op}: expected {rule}")


def _check_channels(program: Program, slot: int) -> None:
    """Check that every channel is a permutation by its shift, and that every shift occurs once."""
    num_ranks = program.schedule.num_ranks
    channels = program.slots[slot].channels
    shifts = [channel.shift for channel in channels]
    if len(set(shifts)) < len(shifts):
        fail(program, f"slot {slot} has channels of shifts {shifts}: expected each shift once")
    for shift, edges in channels:
        # `jax.lax.ppermute` takes each rank at most once as source and once as destination.
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
    # Every entry is an existing branch, unit or place; -1 is allowed only in the common tables.
    num_ops = np.array([len(slot.ops) for slot in program.slots])
    last = program.schedule.num_units - 1
    largest: dict[str, Any] = {
        "op": num_ops[None, :, None],
        "microbatch": last,
        **dict.fromkeys(COMMON, last),
    }
    largest |= {name: placement.discard for name, placement in program.values.items()}
    largest["arrival"] = program.values["operand"].discard
    tables = program.rank_tables | program.common._asdict()
    for name, most in largest.items():
        table, least = tables[name], -1 if name in COMMON else 0
        outside = np.argwhere((table < least) | (table > most))
        if len(outside):
            at = tuple(outside[0].tolist())
            limit = int(np.broadcast_to(np.asarray(most), table.shape)[at])
            fail(program, f"table {name!r}: expected {least}..{limit}, found {table[at]}", at)


def _check_idle(program: Program) -> None:
    """Check that idle ranks name no place, and that unused columns of channels are discarded."""
    idle = program.op == 0
    nothing = {name: placement.discard for name, placement in program.values.items()}
    for name, value in {"microbatch": 0, **nothing}.items():
        table = program.rank_tables[name]
        wrong = np.argwhere((table != value).reshape(*idle.shape, -1).any(axis=-1) & idle)
        if len(wrong):
            at = tuple(wrong[0].tolist())
            text = f"expected {value}, found {table[at].tolist()}"
            fail(program, f"idle, table {name!r}: {text}", at)
    for slot, (_, _, channels) in enumerate(program.slots):
        wrong = np.argwhere(program.arrives[:, slot, :, len(channels) :])
        if len(wrong):
            tick, rank, column = wrong[0].tolist()
            at = (tick, slot, rank, len(channels) + column)
            text = f"expected discard, buffer {nothing['operand']}, found buffer"
            fail(
                program, f"the slot has {len(channels)} channels: {text} {program.arrival[at]}", at
            )


def stage_of(program: Program, at: Place) -> int:
    """Return the stage of the op that runs at a place."""
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
