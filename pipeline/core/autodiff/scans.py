"""The split of a `scan` into two scans, with crossing values stacked, one row per trip.

The second loop carries only values that the first does not need. If gradients are added to refs,
there are no such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.core.autodiff.halves import Halve, Mask, NameFacts, Pieces, facts_inside
from pipeline.core.autodiff.jaxpr.reachability import closed_mask
from pipeline.core.autodiff.jaxpr.steps import (
    Atom,
    JaxprLoop,
    JaxprStep,
    Name,
    cost_inside,
    names,
    read,
    run,
)


@dataclass(frozen=True)
class _Carried:
    """The names of a carried value: in the body, before the loop, after a trip, and at the end."""

    inside: Name
    start: Atom
    out: Atom
    end: Name


def split_loop(
    step: JaxprStep, loop: JaxprLoop, mine: Mask, theirs: Mask, facts: NameFacts, halve: Halve
) -> Pieces:
    """Split a `scan` into two scans.

    Args:
      mine: the mask of results that the first half needs.
      theirs: the mask of results that only the second half needs.
    """
    body, first_xs = loop.body, loop.num_consts + loop.num_carry
    early, _ = closed_mask(step, loop, mine, facts.refs, adds=False)
    late, _ = closed_mask(step, loop, theirs, facts.refs, adds=True)
    late = [b and not a for a, b in zip(early, late, strict=True)]
    carries = list(
        map(
            _Carried,
            body.inputs[loop.num_consts : first_xs],
            step.reads[loop.num_consts : first_xs],
            body.outs,
            step.makes,
        )
    )
    consts = dict(zip(body.inputs[: loop.num_consts], step.reads, strict=False))
    xs = dict(zip(body.inputs[first_xs:], step.reads[first_xs:], strict=True))
    inside = facts_inside(body, step.reads, facts)
    carried = {c.inside for c in carries}
    inside = NameFacts(
        refs=inside.refs,
        same=inside.same - carried,
        again=inside.again - carried,
        late=(inside.late - carried) | {c.inside for c, m in zip(carries, late, strict=False) if m},
        shared=dict.fromkeys(consts, loop.params["length"]),
    )
    halves = halve(body, early, late, inside)
    length, made = loop.params["length"], [n for n in halves.crossing if n not in consts | xs]
    stacked = {n: Name(n.aval.update(shape=(length, *n.aval.shape))) for n in made}
    tail = list(zip(body.outs, step.makes, strict=True))[loop.num_carry :]

    def part(steps: Sequence[JaxprStep], mask: Mask, **extra: Any) -> JaxprStep | None:
        mine = [c for c, m in zip(carries, mask, strict=False) if m]
        ys = [pair for pair, m in zip(tail, mask[loop.num_carry :], strict=True) if m]
        return _loop_step(step.label, loop, steps, consts, mine, xs, ys, **extra)

    first = part(halves.first, early, ys_more=list(stacked.items()))
    second = part(halves.second, late, xs_more=stacked)
    return Pieces(first, second, tuple(f"in a scan: {text}" for text in halves.whole))


def _loop_step(
    label: str,
    loop: JaxprLoop,
    steps: Sequence[JaxprStep],
    consts: dict[Name, Atom],
    carries: Sequence[_Carried],
    xs: dict[Name, Atom],
    ys: Sequence[tuple[Atom, Name]],
    *,
    ys_more: Sequence[tuple[Atom, Name]] = (),
    xs_more: dict[Name, Atom] | None = None,
) -> JaxprStep | None:
    """Make a loop over some steps of a body, with their operands; None if there are no steps."""
    ys, xs = [*ys, *ys_more], xs | (xs_more or {})
    if not steps and not carries and not ys:
        return None
    outs = [*(c.out for c in carries), *(atom for atom, _ in ys)]
    used = {n for s in steps for n in s.names} | set(names(outs))
    consts = {n: a for n, a in consts.items() if n in used}
    xs = {n: a for n, a in xs.items() if n in used}
    sizes = len(consts), len(carries)

    def call(*values: Any) -> list[Any]:
        constants = loop.body.constants | dict(zip(consts, values, strict=False))
        init, rows = values[sizes[0] : sum(sizes)], values[sum(sizes) :]

        def body(carry: Any, row: Any) -> Any:
            env = constants | dict(zip((c.inside for c in carries), carry, strict=True))
            env = run(steps, env | dict(zip(xs, row, strict=True)))
            results = [read(env, atom) for atom in outs]
            return tuple(results[: len(carries)]), tuple(results[len(carries) :])

        ends, stacks = jax.lax.scan(body, tuple(init), tuple(rows), **loop.params)
        return [*ends, *stacks]

    return JaxprStep(
        reads=(*consts.values(), *(c.start for c in carries), *xs.values()),
        makes=(*(c.end for c in carries), *(name for _, name in ys)),
        call=call,
        cost=cost_inside(steps),
        label=label,
        effect=any(s.effect for s in steps),
    )
