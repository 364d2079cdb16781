"""A slot without any conditional: every rank computes, and what is not real is masked away.

For hardware on which collectives inside a branch are in doubt. It stays because ``auto_axes`` needs
it on virtual CPU devices, which all meet in a collective that the compiler adds to a stage: without
it such a model could not be tried, nor tested, before there is hardware. The arithmetic of a bubble
runs on whatever lies in the buffers, so each of its results is dropped by a select, never by a
product: a NaN times zero is a NaN. Gradients are formed by value and selected before they are
added, which costs a temporary of their size; embed, head and loss run on every rank.

Where backwards are split, a slot computes the half for the input, then the half for the weights:
of what the first has just left (B), or of what the rank's I left before (W). Together these are the
multiplications of one backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.base.tree import Leaves, Tree, blank, partition
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.stores.store import Row
from schedules.lowering.program import Op, Slot


class SlotFacts:
    """Facts about a slot's action, from its branch number, as traced values."""

    def __init__(self, slot: Slot, row: Row) -> None:
        self._ops, self._branch = slot.ops, row["op"]
        self.forward = self._holds(lambda op: op.kind == "F")
        self.backward = self._holds(lambda op: op.kind != "F")
        self.for_input = self._holds(lambda op: op.kind in ("B", "I"))
        self.for_weights = self._holds(lambda op: op.kind in ("B", "W"))
        self.splits = any(op.kind in ("I", "W") for op in slot.ops)
        # Only I writes a crossing to its place, and only B adds weight gradients from a crossing of
        # the same slot.
        self.leaves = self._holds(lambda op: op.kind == "I")
        self.both = self._holds(lambda op: op.kind == "B")
        self.first = self._holds(lambda op: op.first)
        self.last = self._holds(lambda op: op.last)
        chunks = {op.chunk for op in slot.ops}
        self.chunk = self._look_up(lambda op: op.chunk) if len(chunks) > 1 else max(chunks)

    # A fact that is known while tracing spares a select, or a whole computation.
    def _holds(self, fact: Callable[[Op], bool]) -> Any:
        """Tell whether a fact holds: a Python bool where all ops and idleness agree."""
        return self._look_up(fact) if any(map(fact, self._ops)) else False

    def _look_up(self, fact: Callable[[Op], int]) -> Any:
        return jnp.asarray(np.array([0, *map(fact, self._ops)]))[self._branch].astype(
            jnp.bool_ if isinstance(fact(self._ops[0]), bool) else jnp.int32
        )


def run_masked(actions: Actions, slot: Slot, row: Row, message: Tree) -> Tree:
    """Compute every kind of action the slot may hold, keep what is real; returns the message.

    A rank that does nothing returns the message of whatever it has computed, never ``message``.
    """
    del message
    facts = SlotFacts(slot, row)
    writes = actions.local.rank.declared is not None
    if facts.backward is False:
        return _forward(actions, facts, row, _operand(actions, facts, row, now=True))
    # Where state is written, the backward's call reads the state that its microbatch's F read and
    # F's call reads the current one, so they are two calls.
    x = _operand(actions, facts, row)
    gradient = _backward(actions, facts, row, x)
    if facts.forward is False:
        return gradient
    x = _operand(actions, facts, row, now=True) if writes else x
    return _select(facts.forward, _forward(actions, facts, row, x), gradient)


def _select(condition: Any, yes: Tree, no: Tree) -> Tree:
    """``yes`` or ``no``, leaf by leaf; no select where the answer is known."""
    if isinstance(condition, bool):
        return yes if condition else no
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _operand(actions: Actions, facts: SlotFacts, row: Row, *, now: bool = False) -> Tree:
    """The stage's input on every rank; ``now`` where a forward takes it."""
    received, microbatch = actions.stores.device["operand"][row["operand"]], row["microbatch"]
    if facts.first is False:
        return received
    # Stage 0's input comes from embed and that of others from a message; on a rank with both kinds
    # of chunks a select decides.
    outcome = actions.embed(microbatch, now=now)
    if now:
        actions.sums.take(outcome, microbatch, real=facts.forward & facts.first)
    return _select(facts.first, outcome.value, received)


def _forward(actions: Actions, facts: SlotFacts, row: Row, x: Tree) -> Tree:
    local, microbatch = actions.local, row["microbatch"]
    arguments = *local.stage_arguments(facts.chunk, microbatch, now=True), x
    if actions.saved.recomputes:
        outcome = local.stage(*arguments)
    else:
        outcome, stash = actions.saved.residuals.forward(*arguments)
        stashes = actions.stores.device["stash"]
        # A rank with a backward in this slot computes a forward too, and its row names the stash
        # that the backward reads. The bubble's stash goes to the last place instead.
        stashes[jnp.where(facts.forward, row["stash"], stashes.places - 1)] = stash
    actions.sums.take(outcome, microbatch, facts.chunk, real=facts.forward)
    if not actions.step.training and facts.last is not False:
        _finish(actions, facts.forward & facts.last, outcome.value, microbatch)
    return actions.sent(outcome.value)


def _finish(actions: Actions, real: Any, y: Tree, microbatch: Any) -> None:
    """The end of an inference."""
    outcome, results = actions.finish(y, microbatch), actions.sums.results
    actions.sums.take(outcome, microbatch, real=real)
    if not actions.step.take_loss:
        results[microbatch] = _select(real, outcome.value, results[microbatch])


def _backward(actions: Actions, facts: SlotFacts, row: Row, x: Tree) -> Tree:
    dx, dw = (_halves if facts.splits else _at_once)(actions, facts, row, x)
    for chunk, total in enumerate(actions.sums.chunk_grads):
        if facts.for_weights is False:
            continue
        # Where a slot holds several chunks, the gradients belong to a chunk that only the row
        # knows: each total takes them or adds zeros.
        if not isinstance(facts.chunk, int):
            total.add(dw, facts.for_weights & (facts.chunk == chunk))
        elif facts.chunk == chunk:
            total.add(dw, facts.for_weights)
    if facts.first is not False and facts.for_input is not False and actions.wants_upstream:
        real = facts.first & facts.for_input
        _embed_gradient(actions, real, dx, row["microbatch"])
    return actions.as_message(dx) if actions.local.need.x else actions.no_message()


def _at_once(actions: Actions, facts: SlotFacts, row: Row, x: Tree) -> tuple[Leaves, Leaves]:
    """The gradients for a stage's input and for its weights."""
    local, microbatch = actions.local, row["microbatch"]
    if actions.saved.recomputes:
        again, stage = local.stage_pullback(facts.chunk, microbatch, x)
        y = again.value
    else:
        arguments = local.stage_arguments(facts.chunk, microbatch)
        stash = actions.stores.device["stash"][row["stash"]]
        y = actions.saved.output(row, stash, arguments)
        stage = actions.saved.residuals.backward(*arguments, stash)
    dw, dx = stage.values(_output_gradient(actions, facts, row, y))
    return dx, dw


def _halves(actions: Actions, facts: SlotFacts, row: Row, x: Tree) -> tuple[Leaves, Leaves]:
    """Compute the gradients by the two halves of a split backward."""
    halves = actions.halves
    arguments = actions.local.stage_arguments(facts.chunk, row["microbatch"])
    # A slot with W alone returns zeros for the input's gradient, which it does not compute.
    dx, _ = partition(blank(actions.local.activation, actions.local.axes))
    dw, crossing = [], None
    if facts.for_input is not False:
        dy: Any = functools.partial(_output_gradient, actions, facts, row)
        # I repeats the stage anyway, and takes the loss of that output; from residuals the last
        # stage's output is read from its place first.
        if actions.saved.recomputes:
            stash = x
        else:
            stash = actions.stores.device["stash"][row["stash"]]
            dy = dy(actions.saved.output(row, stash, arguments))
        dx, crossing = halves.input_half(*arguments, stash, dy, [], want_x=actions.local.need.x)
        crossings = actions.stores.device["crossing"]
        # The crossing of a B is read below, in the same slot, and needs no place.
        crossings[jnp.where(facts.leaves, row["crossing"], crossings.places - 1)] = crossing
    if facts.for_weights is not False:
        left = actions.stores.device["crossing"][row["crossing"]]
        left = left if facts.both is False else _select(facts.both, crossing, left)
        dw = halves.weight_half(*arguments, left, [])
    return dx, dw


def _output_gradient(actions: Actions, facts: SlotFacts, row: Row, y: Tree) -> Leaves:
    """The gradient for a stage's output: from its message or, on the last stage, of the loss."""
    dy, _ = partition(actions.stores.device["gradient"][row["gradient"]])
    if facts.last is False:
        return dy
    return _loss_gradient(actions, facts, y, dy, row["microbatch"])


def _loss_gradient(
    actions: Actions, facts: SlotFacts, y: Tree, dy: Leaves, microbatch: Any
) -> Leaves:
    outcome, pullback = actions.local.loss_pullback(y, microbatch)
    real = facts.last & facts.for_input
    actions.sums.take(outcome, microbatch, real=real)
    dw, of_loss = pullback.values([actions.loss_cotangent()])
    actions.sums.ends_grads.add(dw, real)
    chosen: Leaves = _select(facts.last, of_loss, dy)
    return chosen


def _embed_gradient(actions: Actions, real: Any, dx: Leaves, microbatch: Any) -> None:
    _, pullback = actions.local.embed_pullback(microbatch)
    dw, gradients = pullback.values(dx)
    actions.sums.ends_grads.add(dw, real)
    if actions.step.want_inputs:
        before = actions.sums.input_grads[microbatch]
        actions.sums.input_grads[microbatch] = _select(real, gradients, before)
