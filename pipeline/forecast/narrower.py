"""Weights that a compiler keeps in a second dtype during a step, found in its jaxpr.

A stage with float32 weights that computes in bfloat16 casts them in every action. XLA's TPU
compiler takes such a cast out of all loops around it, also that of a part of stacked weights out
of the loop over layers: the weights are cast once a step, and the copy is there as long as
microbatches run. On CPU it stays in the loop.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from pipeline.jaxpr.primitives import bodies, equations, is_ref, traits

Roots = dict[Any, Any]  # a variable to what is whole of it, outside the loops


def cast_once(jaxpr: Any) -> int:
    """Bytes of what does not change in the loops of a body and is cast to a narrower dtype there.

    Args:
      jaxpr: what each device runs.
    """
    copies: dict[tuple[Any, Any], int] = {}
    for eqn in equations(jaxpr):
        if traits(eqn).loops:
            outside = [v for v in eqn.invars if not isinstance(v, Literal) and not is_ref(v.aval)]
            _enter(eqn, {v: v for v in outside}, copies)
    return sum(copies.values())


def _find(jaxpr: Any, roots: Roots, copies: dict[Any, int]) -> None:
    """Look through the equations of a body within a loop."""
    roots = dict(roots)
    for eqn in jaxpr.eqns:
        first = eqn.invars[0] if eqn.invars else None
        root = roots[first] if _is_of(first, roots) else None
        if eqn.primitive.name == "convert_element_type" and root is not None:
            dtype = eqn.outvars[0].aval.dtype
            if dtype.itemsize < root.aval.dtype.itemsize:
                copies[root, dtype] = root.aval.size * dtype.itemsize
                continue
        if root is not None and (traits(eqn).moves or traits(eqn).part):
            roots.update(dict.fromkeys(eqn.outvars, root))
        else:
            _enter(eqn, roots, copies)


def _enter(eqn: Any, roots: Roots, copies: dict[Any, int]) -> None:
    """Look into the bodies of an equation, at those operands that a loop does not change."""
    for body in bodies(eqn):
        inputs = body.jaxpr.invars
        given = dict(zip(inputs, eqn.invars[body.first :], strict=True))
        kept = [v for n, v in enumerate(inputs) if n not in body.carry]
        inner = {v: roots[given[v]] for v in kept if _is_of(given[v], roots)}
        if inner:
            _find(body.jaxpr, inner, copies)


def _is_of(atom: Any, roots: Roots) -> bool:
    return not isinstance(atom, Literal) and atom in roots
