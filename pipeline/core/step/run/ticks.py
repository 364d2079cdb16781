"""The ticks of a program, one after the other: a `lax.scan` over its table.

Letters: S ranks, T ticks. For every slot of a tick a rank runs what its row of the table says,
sends the message along the slot's channels and stores what arrives where the table says. Where
sends are delayed the scan carries the message of the slot before, whose exchange then depends on
nothing that the slot computes: the compiler may run both at a time. A message takes the place of
the last that has been exchanged, so that of two slots each has a place of its own. The scan also
carries the arrays in host memory (`pipeline.core.step.stores.host`).

A loop over ticks compiles all that any of them does, and in each exchanges in all directions that
any of them needs. An idle action costs nothing, an exchange its bytes, whoever reads them. Where
all that happens before a tick is other than what happens from it on (first all forwards, then all
backwards), a loop for either compiles nothing twice, and exchanges only where its messages go.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE, exchange
from pipeline.base.tree import Tree
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.stores.loops import run_once
from pipeline.core.step.stores.store import Row
from schedules.lowering.needs import WORK, busy_in, needed, segments
from schedules.lowering.program import COMMON, Program


def run_ticks(actions: Actions, program: Program, tables: Row) -> None:
    """Run every tick; its results are in the sums of ``actions``."""
    with actions.opened(program):
        _scan_ticks(actions, program, tables)


def _scan_ticks(actions: Actions, program: Program, tables: Row) -> None:
    """Run every tick, with weights where actions find them."""
    delayed = program.delayed
    # Operands and gradients share one pool: whatever a channel brings is stored there.
    messages, carried = actions.stores.device["operand"], actions.stores.carried
    common = None
    if program.shared:
        from pipeline.core.step.run.vocabulary import VocabularyParallel

        common = VocabularyParallel(actions, program)

    def tick(
        part: tuple[int, int], uses: tuple[int, ...], busy: Any, carry: tuple[Tree, Any], rows: Row
    ) -> tuple[tuple[Tree, Any], None]:
        delayed_message, arrays = carry
        carried.put(arrays)
        exchanged = None  # the last message that has been exchanged, whose memory is free
        # Slots that no tick of this loop uses are left out: an exchange costs its bytes whoever
        # reads them.
        for index in np.flatnonzero(uses).tolist():
            # Only what some tick of this loop does in the slot is compiled. If that is not all,
            # branches have other numbers than the program's.
            need, row = needed(program, index, *part), {name: rows[name][index] for name in rows}
            if need.is_part:
                row["op"] = jnp.asarray(need.branch)[row["op"]]
            # A delayed exchange comes before the work and needs nothing of it.
            between_ranks = [channel for _, channel in need.channels if channel.shift]
            early = {c: exchange(delayed_message, c.edges, STAGE) for c in between_ranks if delayed}
            with jax.named_scope(scopes.of_slot(index)):
                if common:
                    common.before(row, busy[index])
                # A rank without an action sends something too: every rank takes part in an
                # exchange, and who has no use for what arrives stores it in the discard place.
                message = actions.no_message() if exchanged is None else exchanged
                # With delayed sends a message may arrive in a slot in which no rank has an action.
                if uses[index] == WORK:
                    message = actions.run_slot(need.slot, row, message)
                if common:
                    message = common.after(row, busy[index], message)
            # Tables of `arrival` name the discard place where this rank reads nothing.
            for column, channel in need.channels:
                arrived = early.get(channel, message)
                if channel.shift and not delayed:
                    arrived = exchange(message, channel.edges, STAGE)
                messages[row["arrival"][column]] = arrived
            delayed_message, exchanged = (message, delayed_message) if delayed else (None, message)
        return (delayed_message, carried.get()), None

    # The shard_map leaves a rank its column of most tables, under an axis of length 1. The tables
    # of work that all ranks share have no such axis.
    local = {name: table if name in COMMON else table[0] for name, table in tables.items()}
    # All else is in refs, which the scan closes over. Carried are the message that waits for its
    # exchange in the next slot, and arrays in host memory: a ref there JAX would copy whole to the
    # device (`pipeline.core.step.stores.host`).
    carry = actions.no_message() if delayed else None, carried.get()
    # One scan for each run of ticks in which the same things happen (see above).
    for start, stop, uses in segments(program):
        body = functools.partial(tick, (start, stop), uses, busy_in(program, start, stop))
        with jax.named_scope(scopes.of_ticks(start, stop)):
            # A scan of one trip would be inlined, and XLA would copy the stashes that it updates
            # (`run_once`).
            if stop - start == 1:
                row = {name: table[start] for name, table in local.items()}
                carry = _once(body, carry, row)
                continue
            rows = {name: table[start:stop] for name, table in local.items()}
            carry, _ = jax.lax.scan(body, carry, rows)
    carried.put(carry[1])


def _once(body: Any, carry: tuple[Tree, Any], row: Row) -> tuple[Tree, Any]:
    """The carry after one tick, by a loop of one trip: XLA updates its arrays in place."""
    message, arrays = carry

    def update(value: tuple[Tree, Any]) -> tuple[Tree, Any]:
        return body((message, value[1]), row)[0]

    return run_once(update, (message, arrays))
