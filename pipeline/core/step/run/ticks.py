"""The ticks of a program, one after the other: a `lax.scan` over its table.

Letters: S ranks, T ticks. In every slot of a tick, a rank runs the action in its row of the table,
sends the message along the slot's channels, and stores arriving messages in the places that the
table names. With delayed sends, the scan carries the message of the previous slot. Its exchange
does not depend on the work of this slot, so the compiler may run both at once. A new message
reuses the memory of the last exchanged message. The scan also carries the arrays in host memory
(`pipeline.core.step.stores.host`).

One loop over ticks compiles the actions of all its ticks, and every tick exchanges in all
directions that any tick needs. An idle action costs nothing; an exchange costs its bytes even if
they are not read. Sometimes all ticks before a tick have other actions than all ticks from it on
(first all forwards, then all backwards). Then two loops compile nothing twice, and each exchanges
only in the directions of its messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE, exchange
from pipeline.base.tree import Tree
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.step.run.rank_actions import RankActions
from pipeline.core.step.stores.loops import run_once
from pipeline.core.step.stores.store import Row
from schedules.lowering.needs import WORK, busy_in, needed, segments
from schedules.lowering.program import COMMON


def run_ticks(actions: RankActions, tables: Row) -> None:
    """Run every tick, with the windows of weights open; the results are in the sums of actions."""
    with actions.opened():
        program, carried = actions.program, actions.stores.carried
        tick = _make_tick(actions)
        # The shard_map gives a rank its column of most tables, with a leading axis of length 1.
        # Tables of work that all ranks share have no such axis.
        local = {name: table if name in COMMON else table[0] for name, table in tables.items()}
        # The scan carries the message that is exchanged in the next slot, and the arrays in host
        # memory, because JAX would copy a ref in host memory whole to the device
        # (`pipeline.core.step.stores.host`). All other values are in refs, which the scan closes
        # over.
        carry = actions.no_message() if program.delayed else None, carried.get()
        # One scan for each segment of ticks with equal kinds of work (see above).
        for start, stop, uses in segments(program):
            body = functools.partial(tick, (start, stop), uses, busy_in(program, start, stop))
            with jax.named_scope(scopes.of_ticks(start, stop)):
                # A scan of one trip would be inlined, and XLA would copy the stashes that it
                # updates (`run_once`).
                if stop - start == 1:
                    row = {name: table[start] for name, table in local.items()}
                    carry = _once(body, carry, row)
                    continue
                rows = {name: table[start:stop] for name, table in local.items()}
                carry, _ = jax.lax.scan(body, carry, rows)
        carried.put(carry[1])


def _make_tick(actions: RankActions) -> Callable[..., tuple[tuple[Tree, Any], None]]:
    """Make the function of one tick of a loop.

    Its arguments are the first and last tick of the loop, the use of each slot, the tables with
    entries in each slot, the carry and the tick's rows. It returns the carry.
    """
    program = actions.program
    delayed = program.delayed
    # Operands and gradients share one pool: all arriving messages are stored there.
    messages, carried = actions.stores.device["operand"], actions.stores.carried
    common = None
    if program.shared:
        from pipeline.core.step.run.vocabulary import SharedSlots

        common = SharedSlots(actions)

    def tick(
        part: tuple[int, int], uses: tuple[int, ...], busy: Any, carry: tuple[Tree, Any], rows: Row
    ) -> tuple[tuple[Tree, Any], None]:
        delayed_message, arrays = carry
        carried.put(arrays)
        exchanged = None  # the last exchanged message, whose memory is free
        # Slots that no tick of this loop uses are left out: an exchange costs its bytes even if
        # they are not read.
        for index in np.flatnonzero(uses).tolist():
            # Only the ops that some tick of this loop runs in the slot are compiled. If this leaves
            # ops out, the remaining branches get new numbers.
            need, row = needed(program, index, *part), {name: rows[name][index] for name in rows}
            if need.is_part:
                row["op"] = jnp.asarray(need.branch)[row["op"]]
            # A delayed exchange comes before the work, and does not depend on it.
            between_ranks = [channel for _, channel in need.channels if channel.shift]
            early = {c: exchange(delayed_message, c.edges, STAGE) for c in between_ranks if delayed}
            with jax.named_scope(scopes.of_slot(index)):
                if common:
                    common.before(row, busy[index])
                # A rank without an action sends a placeholder: every rank takes part in an
                # exchange, and a rank that needs no message stores it in the discard place.
                message = actions.no_message() if exchanged is None else exchanged
                # With delayed sends a message may arrive in a slot in which no rank has an action.
                if uses[index] == WORK:
                    message = actions.run_slot(need.slot, row, message)
                if common:
                    message = common.after(row, busy[index], message)
            # The table `arrival` names the discard place for messages that this rank does not read.
            for column, channel in need.channels:
                arrived = early.get(channel, message)
                if channel.shift and not delayed:
                    arrived = exchange(message, channel.edges, STAGE)
                messages[row["arrival"][column]] = arrived
            delayed_message, exchanged = (message, delayed_message) if delayed else (None, message)
        return (delayed_message, carried.get()), None

    return tick


def _once(body: Any, carry: tuple[Tree, Any], row: Row) -> tuple[Tree, Any]:
    """Run one tick in a loop of one trip, so that XLA updates its arrays in place."""
    message, arrays = carry

    def update(value: tuple[Tree, Any]) -> tuple[Tree, Any]:
        return body((message, value[1]), row)[0]

    return run_once(update, (message, arrays))
