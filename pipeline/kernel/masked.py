"""A slot without any conditional: every rank computes, and what is not real is masked away.

For hardware on which collectives inside a branch are in doubt. The arithmetic of a bubble runs on
whatever lies in the buffers, so each of its results is dropped by a select, never by a product: a
NaN times zero is a NaN. Gradients are formed by value and selected before they are added, which
costs a temporary of their size; embed, head and loss run on every rank.

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

from pipeline.base.tree import Leaves, Tree, at, blank, partition
from pipeline.kernel.actions import Actions, Row
from pipeline.kernel.memory import Total
from pipeline.rank.cell import Cell
from schedules.lowering.program import Op, Slot


class Facts:
    """What the branch number of a slot says about the action, as traced values."""

    def __init__(self, slot: Slot, row: Row) -> None:
        self._ops, self._branch = slot.ops, row["op"]
        self.forward = self._holds(lambda op: op.kind == "F")
        self.backward = self._holds(lambda op: op.kind != "F")
        self.for_input = self._holds(lambda op: op.kind in ("B", "I"))
        self.for_weights = self._holds(lambda op: op.kind in ("B", "W"))
        self.splits = any(op.kind in ("I", "W") for op in slot.ops)
        self.leaves = self._holds(lambda op: op.kind == "I")
        self.both = self._holds(lambda op: op.kind == "B")
        self.first = self._holds(lambda op: op.first)
        self.last = self._holds(lambda op: op.last)
        chunks = {op.chunk for op in slot.ops}
        self.chunk = self._look_up(lambda op: op.chunk) if len(chunks) > 1 else max(chunks)

    def _holds(self, fact: Callable[[Op], bool]) -> Any:
        """Whether a fact holds: a Python bool where it is the same for all ops and idleness."""
        return self._look_up(fact) if any(map(fact, self._ops)) else False

    def _look_up(self, fact: Callable[[Op], int]) -> Any:
        return jnp.asarray(np.array([0, *map(fact, self._ops)]))[self._branch].astype(
            jnp.bool_ if isinstance(fact(self._ops[0]), bool) else jnp.int32
        )


def run_masked(actions: Actions, slot: Slot, row: Row) -> Tree:
    """Compute every kind of action the slot may hold, keep what is real; returns the message."""
    facts = Facts(slot, row)
    x = _operand(actions, facts, row)
    if facts.backward is False:
        return _forward(actions, facts, row, x)
    gradient = _backward(actions, facts, row, x)
    if facts.forward is False:
        return gradient
    return _select(facts.forward, _forward(actions, facts, row, x), gradient)


def _select(condition: Any, yes: Tree, no: Tree) -> Tree:
    """``yes`` or ``no``, leaf by leaf; no select where the answer is known."""
    if isinstance(condition, bool):
        return yes if condition else no
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _add(total: Total, condition: Any, values: Leaves) -> None:
    if condition is not False:
        total.add(_select(condition, values, [jnp.zeros_like(v) for v in values]))


def _operand(actions: Actions, facts: Facts, row: Row) -> Tree:
    """The stage's input on every rank."""
    received, cell = actions.buffers[row["operand"]], actions.cell
    if facts.first is False:
        return received
    inputs = at(cell.batch.inputs, row["microbatch"])
    return _select(facts.first, cell.embed(cell.ends_weights, inputs, row["microbatch"]), received)


def _forward(actions: Actions, facts: Facts, row: Row, x: Tree) -> Tree:
    cell, microbatch = actions.cell, row["microbatch"]
    arguments = *cell.stage_arguments(facts.chunk, microbatch), x
    if actions.residuals is None:
        y = cell.stage(*arguments)
    else:
        y, stash = actions.residuals.forward(*arguments)
        trash = actions.stashes.places - 1
        actions.stashes[jnp.where(facts.forward, row["stash"], trash)] = stash
    if actions.training or facts.last is False:
        return actions.sent(y)
    real = facts.forward & facts.last
    if actions.take_loss:
        _add(actions.loss, real, list(cell.loss(cell.ends_weights, y, microbatch)))
    else:
        found = cell.outputs(cell.ends_weights, y, microbatch)
        actions.results[microbatch] = _select(real, found, actions.results[microbatch])
    return actions.sent(y)


def _backward(actions: Actions, facts: Facts, row: Row, x: Tree) -> Tree:
    dx, dw = (_halves if facts.splits else _at_once)(actions, facts, row, x)
    for chunk, total in enumerate(actions.chunk_grads):
        if facts.for_weights is False:
            continue
        if not isinstance(facts.chunk, int):
            _add(total, facts.for_weights & (facts.chunk == chunk), dw)
        elif facts.chunk == chunk:
            _add(total, facts.for_weights, dw)
    if facts.first is not False and facts.for_input is not False and actions.wants_upstream:
        real = facts.first & facts.for_input
        _embed_gradient(actions.cell, actions, real, dx, row["microbatch"])
    return actions.as_message(dx) if actions.cell.way.x else actions.no_message()


def _at_once(actions: Actions, facts: Facts, row: Row, x: Tree) -> tuple[Leaves, Leaves]:
    """The gradients for a stage's input and for its weights."""
    cell, microbatch = actions.cell, row["microbatch"]
    if actions.residuals is None:
        y, stage = cell.stage_pullback(facts.chunk, microbatch, x)
    else:
        arguments = cell.stage_arguments(facts.chunk, microbatch)
        y = actions.own_output(row)
        stage = actions.residuals.backward(*arguments, actions.stashes[row["stash"]])
    dw, dx = stage.values(_output_gradient(actions, facts, row, y))
    return dx, dw


def _halves(actions: Actions, facts: Facts, row: Row, x: Tree) -> tuple[Leaves, Leaves]:
    """The same, by the two halves of a split backward."""
    halves = actions.halves
    arguments = actions.cell.stage_arguments(facts.chunk, row["microbatch"])
    dx, _ = partition(blank(actions.cell.activation, actions.cell.axes))
    dw, crossing = [], None
    if facts.for_input is not False:
        dy: Any = functools.partial(_output_gradient, actions, facts, row)
        if actions.residuals is None:
            stash = x
        else:
            stash, dy = actions.stashes[row["stash"]], dy(actions.own_output(row))
        dx, crossing = halves.input_half(*arguments, stash, dy, [], want_x=actions.cell.way.x)
        trash = actions.crossings.places - 1
        actions.crossings[jnp.where(facts.leaves, row["crossing"], trash)] = crossing
    if facts.for_weights is not False:
        left = actions.crossings[row["crossing"]]
        left = left if facts.both is False else _select(facts.both, crossing, left)
        dw = halves.weight_half(*arguments, left, [])
    return dx, dw


def _output_gradient(actions: Actions, facts: Facts, row: Row, y: Tree) -> Leaves:
    """The gradient for a stage's output: from its message or, on the last stage, of the loss."""
    dy, _ = partition(actions.returned[row["gradient"]])
    if facts.last is False:
        return dy
    return _loss_gradient(actions.cell, actions, facts, y, dy, row["microbatch"])


def _loss_gradient(
    cell: Cell, actions: Actions, facts: Facts, y: Tree, dy: Leaves, microbatch: Any
) -> Leaves:
    total, weight, pullback = cell.loss_pullback(y, microbatch)
    real = facts.last & facts.for_input
    _add(actions.loss, real, [total, weight])
    dw, found = pullback.values(actions.cell.loss_cotangent())
    _add(actions.ends_grads, real, dw)
    chosen: Leaves = _select(facts.last, found, dy)
    return chosen


def _embed_gradient(cell: Cell, actions: Actions, real: Any, dx: Leaves, microbatch: Any) -> None:
    _, pullback = cell.embed_pullback(microbatch)
    dw, found = pullback.values(dx)
    _add(actions.ends_grads, real, dw)
    if actions.want_inputs:
        kept = actions.input_grads[microbatch]
        actions.input_grads[microbatch] = _select(real, found, kept)
