"""Weights that a compiler keeps in a second dtype during a step, found in its jaxpr.

A stage with float32 weights that computes in bfloat16 casts them in every action. XLA's TPU
compiler takes such a cast out of all loops around it, also that of a part of stacked weights out
of the loop over layers: the weights are cast once a step, and the copy is there as long as
microbatches run. On CPU it stays in the loop.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from collectives.compat import loop_sizes
from pipeline.jaxpr.primitives import callee, is_ref, moves

Roots = dict[Any, Any]  # a variable to what is whole of it, outside the loops

_PARTS = frozenset(("dynamic_slice", "gather", "slice", "split", "unstack"))
_LOOPS = frozenset(("scan", "while"))


def cast_once(jaxpr: Any) -> int:
    """Bytes of what does not change in the loops of a body and is cast to a narrower dtype there.

    Args:
      jaxpr: what each device runs.
    """
    copies: dict[tuple[Any, Any], int] = {}
    _look_for_loops(jaxpr, copies)
    return sum(copies.values())


def _look_for_loops(jaxpr: Any, copies: dict[Any, int]) -> None:
    for eqn in jaxpr.eqns:
        body, _ = callee(eqn)
        if body is not None:
            _look_for_loops(getattr(body, "jaxpr", body), copies)
        elif eqn.primitive.name in _LOOPS:
            outside = [v for v in eqn.invars if not isinstance(v, Literal) and not is_ref(v.aval)]
            _enter(eqn, {v: v for v in outside}, copies)


def _find(jaxpr: Any, roots: Roots, copies: dict[Any, int]) -> None:
    """Look through the equations of a body within a loop."""
    roots = dict(roots)
    for eqn in jaxpr.eqns:
        first = eqn.invars[0] if eqn.invars else None
        root = None if first is None or isinstance(first, Literal) else roots.get(first)
        if eqn.primitive.name == "convert_element_type" and root is not None:
            dtype = eqn.outvars[0].aval.dtype
            if dtype.itemsize < root.aval.dtype.itemsize:
                copies[root, dtype] = root.aval.size * dtype.itemsize
                continue
        if root is not None and (moves(eqn) or eqn.primitive.name in _PARTS):
            roots.update(dict.fromkeys(eqn.outvars, root))
        else:
            _enter(eqn, roots, copies)


def _enter(eqn: Any, roots: Roots, copies: dict[Any, int]) -> None:
    """Look into the bodies of an equation, at those operands that a loop does not change."""
    for body, operands in _bodies(eqn):
        jaxpr = getattr(body, "jaxpr", body)
        pairs = zip(jaxpr.invars, operands, strict=True)
        inner = {v: roots[a] for v, a in pairs if a is not None and a in roots}
        if inner:
            _find(jaxpr, inner, copies)


def _bodies(eqn: Any) -> list[tuple[Any, list[Any]]]:
    """The bodies of an equation and their operands: None for literals and what changes."""
    params = eqn.params
    atoms = [None if isinstance(atom, Literal) else atom for atom in eqn.invars]
    match eqn.primitive.name:
        case "scan":
            consts, carry = loop_sizes(eqn)
            blanks = [None] * carry
            return [(params["jaxpr"], [*atoms[:consts], *blanks, *atoms[consts + carry :]])]
        case "while":
            before, consts = params["cond_nconsts"], params["body_nconsts"]
            changing = len(atoms) - before - consts
            kept = atoms[before : before + consts]
            return [(params["body_jaxpr"], [*kept, *[None] * changing])]
        case "cond":
            return [(branch, atoms[1:]) for branch in params["branches"]]
    body, _ = callee(eqn)
    return [] if body is None else [(body, atoms)]
