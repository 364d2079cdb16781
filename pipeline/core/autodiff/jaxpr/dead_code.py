"""Dead code elimination: removal of unused steps at any depth.

A loop or a branch may have operands that its body does not use, and results that no step reads.
Without them, a step reads only values that its results need. The split of steps relies on this
(`pipeline.core.autodiff.split`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from pipeline.core.autodiff.jaxpr.reachability import (
    Refs,
    closed_mask,
    inner_refs,
    needed_inputs,
    touched,
)
from pipeline.core.autodiff.jaxpr.steps import (
    Branches,
    JaxprBlock,
    JaxprLoop,
    JaxprStep,
    names,
    narrow,
    run_block,
)

T = TypeVar("T")


def lean(block: JaxprBlock, wanted: Sequence[bool], refs: Refs) -> JaxprBlock:
    """Keep the wanted outputs of a block; remove dead steps, operands and results, at any depth."""
    outs = tuple(a for a, w in zip(block.outs, wanted, strict=True) if w)
    needed, steps = set(names(outs)), []
    for step in reversed(block.steps):
        is_needed = [n in needed for n in step.makes]
        if any(is_needed) or step.effect or touched(step):
            thin = _lean_step(step, is_needed, refs)
            needed.update(thin.names)
            steps.append(thin)
    return replace(block, steps=tuple(steps[::-1]), outs=outs)


def _lean_step(step: JaxprStep, wanted: Sequence[bool], refs: Refs) -> JaxprStep:
    match step.inner:
        case JaxprLoop() as loop:
            return _lean_loop(step, loop, wanted, refs)
        case Branches() as branches:
            return _lean_branches(step, branches, wanted, refs)
    return narrow(step, wanted) if step.through else step


def _lean_loop(step: JaxprStep, loop: JaxprLoop, wanted: Sequence[bool], refs: Refs) -> JaxprStep:
    mask, used = closed_mask(step, loop, wanted, refs, adds=True)
    inner = inner_refs(loop.body, step.reads, refs)
    first_xs = loop.num_consts + loop.num_carry
    # A carried value is kept if its final value or the next trip needs it.
    keep = [*used[: loop.num_consts], *mask[: loop.num_carry], *used[first_xs:]]
    body = lean(loop.body, mask, inner)
    if all(keep) and all(mask) and _same_steps(body, loop.body):
        return step
    body = replace(body, inputs=_select(body.inputs, keep))
    num_consts, num_carry = sum(keep[: loop.num_consts]), sum(mask[: loop.num_carry])
    thin = JaxprLoop(body, num_consts, num_carry, loop.params)

    def call(*values: Any) -> list[Any]:
        def trip(carry: Any, row: Any) -> Any:
            results = run_block(body, [*values[:num_consts], *carry, *row])
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        init, rows = values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
        ends, stacks = jax.lax.scan(trip, init, rows, **loop.params)
        return [*ends, *stacks]

    reads, makes = _select(step.reads, keep), _select(step.makes, mask)
    return replace(step, reads=reads, makes=makes, call=call, inner=thin)


def _lean_branches(step: JaxprStep, inner: Branches, mask: Sequence[bool], refs: Refs) -> JaxprStep:
    operands = step.reads[1:]
    uses = [needed_inputs(b, mask, inner_refs(b, operands, refs), adds=True) for b in inner.blocks]
    keep = [any(used) for used in zip(*uses, strict=True)]
    blocks = [lean(b, mask, inner_refs(b, operands, refs)) for b in inner.blocks]
    pairs = zip(blocks, inner.blocks, strict=True)
    if all(keep) and all(mask) and all(_same_steps(*pair) for pair in pairs):
        return step
    thin = [replace(b, inputs=_select(b.inputs, keep)) for b in blocks]

    def call(index: Any, *values: Any) -> Sequence[Any]:
        choices = [lambda *inputs, b=b: tuple(run_block(b, inputs)) for b in thin]
        results: Sequence[Any] = jax.lax.switch(index, choices, *values)
        return results

    reads, makes = (step.reads[0], *_select(operands, keep)), _select(step.makes, mask)
    return replace(step, reads=reads, makes=makes, call=call, inner=Branches(tuple(thin)))


def _same_steps(one: JaxprBlock, other: JaxprBlock) -> bool:
    return len(one.steps) == len(other.steps) and all(map(operator.is_, one.steps, other.steps))


def _select(items: Sequence[T], keep: Sequence[bool]) -> tuple[T, ...]:
    return tuple(item for item, wanted in zip(items, keep, strict=True) if wanted)
