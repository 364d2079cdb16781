"""The split of a `cond` into two `cond`s that take one branch.

The first `cond` passes to the second the values that the branch needs. Branches share slots of
equal type for these values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.base.tree import vary_like, zeros
from pipeline.core.autodiff.halves import Halve, Mask, NameFacts, Pieces, facts_inside
from pipeline.core.autodiff.jaxpr.steps import (
    Atom,
    Branches,
    JaxprBlock,
    JaxprStep,
    Name,
    cost_inside,
    names,
    read,
    run,
)


@dataclass(frozen=True)
class _Branch:
    """One branch of a `cond`: its steps, its results, and the origin of its names.

    Attributes:
      outs: the results; None for a result that this branch need not compute.
      operands: a map from names within the branch to names outside.
    """

    block: JaxprBlock
    steps: Sequence[JaxprStep]
    outs: Sequence[Atom | None]
    operands: dict[Name, Atom]


def split_branches(
    step: JaxprStep, inner: Branches, mine: Mask, theirs: Mask, facts: NameFacts, halve: Halve
) -> Pieces:
    """Split a `cond` into two; `split_loop` explains the arguments."""
    reads, first, second, whole = step.reads[1:], [], [], []
    all_slots: list[Name] = []
    for block in inner.blocks:
        halves = halve(block, mine, theirs, facts_inside(block, reads, facts))
        operands = dict(zip(block.inputs, reads, strict=True))
        slots = _places([n for n in halves.crossing if n not in operands], all_slots)
        crossing = [slots.get(slot) for slot in all_slots]
        outs = [a for a, m in zip(block.outs, mine, strict=True) if m]
        first.append(_Branch(block, halves.first, [*outs, *crossing], operands))
        outs = [a for a, m in zip(block.outs, theirs, strict=True) if m]
        late_operands = operands | {name: slot for slot, name in slots.items()}
        second.append(_Branch(block, halves.second, outs, late_operands))
        whole += [f"in a cond: {text}" for text in halves.whole]
    early = [n for n, m in zip(step.makes, mine, strict=True) if m]
    late = [n for n, m in zip(step.makes, theirs, strict=True) if m]
    return Pieces(
        _switch(step, first, [*early, *all_slots]), _switch(step, second, late), tuple(whole)
    )


def _places(values: Iterable[Name], slots: list[Name]) -> dict[Name, Name]:
    """Assign each value to a slot of its type; branches share slots, and new ones are added."""
    value_of: dict[Name, Name] = {}
    for value in values:
        free = [s for s in slots if s.aval == value.aval and s not in value_of]
        slot = free[0] if free else Name(value.aval)
        if not free:
            slots.append(slot)
        value_of[slot] = value
    return value_of


def _switch(
    step: JaxprStep, branches: Sequence[_Branch], makes: Sequence[Name]
) -> JaxprStep | None:
    """Make a step that runs one of the branches; None if all branches are empty."""
    if not makes and not any(b.steps for b in branches):
        return None
    used = [
        {n for s in b.steps for n in s.names} | set(names(filter(None, b.outs))) for b in branches
    ]
    operands = [
        {n: a for n, a in b.operands.items() if n in u} for b, u in zip(branches, used, strict=True)
    ]
    inside = [s for b in branches for s in b.steps]
    reads = list(dict.fromkeys(n for atoms in operands for n in names(atoms.values())))

    def function(branch: _Branch, atoms: dict[Name, Atom], outer: dict[Name, Any]) -> Any:
        def call() -> tuple[Any, ...]:
            inputs = {n: read(outer, atom) for n, atom in atoms.items()}
            env = run(branch.steps, branch.block.constants | inputs)
            pairs = itertools.zip_longest(branch.outs, makes)
            return tuple(
                vary_like(zeros(n.aval), n.aval) if a is None else read(env, a) for a, n in pairs
            )

        return call

    def call(index: Any, *values: Any) -> Sequence[Any]:
        outer = dict(zip(reads, values, strict=True))
        choices = [function(b, g, outer) for b, g in zip(branches, operands, strict=True)]
        return jax.lax.switch(index, choices)

    return JaxprStep(
        reads=(step.reads[0], *reads),
        makes=tuple(makes),
        call=call,
        cost=cost_inside(inside),
        label=step.label,
        effect=any(s.effect for s in inside),
    )
