"""The ticks of a program, one after the other: a `lax.scan` over its table.

Letters: S ranks, T ticks. For every slot of a tick a rank runs what its row of the table says,
sends the message along the slot's channels and stores what arrives where the table says. Where
sends are delayed the scan carries the message of the slot before, whose exchange then depends on
nothing that the slot computes: the compiler may run both at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE, exchange
from pipeline.base.tree import Tree
from pipeline.kernel import scopes
from pipeline.kernel.actions import Actions, Row
from pipeline.kernel.once import run_once
from pipeline.kernel.scopes import COMMON
from pipeline.kernel.turns import needed, turns
from pipeline.kernel.workers import runner
from pipeline.rank.together import Together, busy_in
from schedules.lowering.program import Program

UNUSED, WAIT, WORK = range(3)  # what ranks do in a slot: nothing, take messages, run actions
MOST_SEGMENTS = 8  # scans of their own for parts of a timetable, before it is one scan


def run_ticks(actions: Actions, program: Program, tables: Row, *, masked: bool) -> None:
    """Run every tick; results are left in the memory of ``actions``."""
    delayed, run = program.delayed, runner(actions, masked=masked)
    common = Together(actions, program, masked=masked) if program.shared else None

    def tick(
        part: tuple[int, int], uses: tuple[int, ...], busy: Any, held: Tree, rows: Row
    ) -> tuple[Tree, None]:
        for index in np.flatnonzero(uses).tolist():
            need, row = needed(program, index, *part), {name: rows[name][index] for name in rows}
            if need.is_part:
                row["op"] = jnp.asarray(need.branch)[row["op"]]
            abroad = [channel for _, channel in need.channels if channel.shift]
            # Delayed sends stand before the work and need nothing of it.
            brought = {c: exchange(held, c.edges, STAGE) for c in abroad if delayed}
            with jax.named_scope(scopes.of_slot(index)):
                if common:
                    common.before(row, busy[index])
                message = run(need.slot, row) if uses[index] == WORK else actions.no_message()
                if common:
                    message = common.after(row, busy[index], message)
            for column, channel in need.channels:
                arrived = brought.get(channel, message)
                if channel.shift and not delayed:
                    arrived = exchange(message, channel.edges, STAGE)
                actions.buffers[row["arrival"][column]] = arrived
            held = message if delayed else None
        return held, None

    local = {name: table if name in COMMON else table[0] for name, table in tables.items()}
    held = actions.no_message() if delayed else None
    for start, stop, uses in segments(program, split=masked):
        busy = busy_in(program, start, stop)
        with jax.named_scope(scopes.of_ticks(start, stop)):
            if stop - start == 1:
                row = {name: table[start] for name, table in local.items()}
                action = functools.partial(tick, (start, stop), uses, busy, held, row)
                held, _ = run_once(action, (held, None))
                continue
            rows = {name: table[start:stop] for name, table in local.items()}
            body = functools.partial(tick, (start, stop), uses, busy)
            held, _ = jax.lax.scan(body, held, rows)


def segments(program: Program, *, split: bool) -> list[tuple[int, int, tuple[int, ...]]]:
    """Runs of ticks (start, stop), and of each slot whether some rank works or waits in them.

    An idle branch costs nothing, so the kernel that branches starts a new run only where all that
    happens takes a turn (`pipeline.kernel.turns`). Without branches an unused slot costs its full
    time: warm-up, steady state and cool-down are scans of their own, unless a timetable changes so
    often that compile time would suffer. Where sends are delayed a message may arrive in a slot
    that nobody works in.
    """
    waits = (program.arrival != program.num_buffers).any(axis=(2, 3))
    uses = np.where((program.op != 0).any(axis=2), WORK, np.where(waits, WAIT, UNUSED))
    turning = turns(program)
    few = turning if len(turning) < MOST_SEGMENTS else []

    def runs(cuts: Iterable[int]) -> list[tuple[int, int, tuple[int, ...]]]:
        pairs = itertools.pairwise([0, *cuts, program.num_ticks])
        return [(a, b, tuple(uses[a:b].max(axis=0).tolist())) for a, b in pairs]

    if not split:
        return runs(few)
    works = np.concatenate([uses, *(getattr(program, name) >= 0 for name in COMMON)], axis=1)
    changed = 1 + np.flatnonzero((works[1:] != works[:-1]).any(axis=1))
    changes = sorted({*changed.tolist(), *few})
    return runs(changes if len(changes) < MOST_SEGMENTS else few)
