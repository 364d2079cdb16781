"""The gradients that ``jax.vjp(...).with_refs`` may add to a buffer in place.

JAX cannot add every gradient in place. These cases fail:

* One equation computes two terms of a weight's gradient. Under `jit` and in the body of a scan, jax
  0.10 loses one term silently. A constant of a scan that is also scanned over raises
  NotImplementedError (jax 0.12).
* jax 0.10 crashes if a gradient passes a static slice, or an input that a body returns unchanged.
* jax 0.10 also fails if a scan's body has an equation that is constant over trips: it is moved out
  of the loop, and the gradients of all constants are mixed up.
* The gradients of a scan's constants are also mixed up if a constant with a gradient by value comes
  before a constant with a ref. This also happens to the arrays that are scanned over.

Such a gradient is computed as a value, in a temporary of its size, and then added. The sum of a
weight and another value has the weight's gradient, and counts as the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Literal

from collectives.compat import REFS_ARE_WHOLE
from pipeline.base.tree import is_float
from pipeline.core.autodiff.jaxpr.primitives import bodies, callee, jaxprs_of, traits

Var = Any


def added_in_place(jaxpr: Any, weights: Sequence[Var]) -> set[Var]:
    """Find the weights (inputs of the jaxpr) whose readers can all add the gradient to a ref."""
    by_ref = set(weights)
    while True:  # a weight may depend on other weights: repeat until the set is stable
        fit = {v for v in weights if v in by_ref and _is_fit(jaxpr, {v}, by_ref)}
        if fit == by_ref:
            return fit
        by_ref = fit


def is_formed_in_a_loop(jaxpr: Any, weight: Var) -> bool:
    """Tell whether a loop, or an opaque equation, reads a weight and so sums its gradient."""
    same = {weight}
    for eqn in jaxpr.eqns:
        places = _places(eqn, same)
        if not places:
            continue
        within = bodies(eqn)
        if traits(eqn).loops or (jaxprs_of(eqn) and not within):
            return True
        if traits(eqn).passes:
            same.update(eqn.outvars)
        inner = ((body.jaxpr, body.jaxpr.invars[n - body.first]) for body in within for n in places)
        if any(is_formed_in_a_loop(*pair) for pair in inner):
            return True
    return False


def _is_fit(jaxpr: Any, same: set[Var], by_ref: set[Var]) -> bool:
    """Tell whether a weight's gradient can be added in place by all equations that read it.

    Args:
      same: variables with the weight's gradient; further such variables are added.
      by_ref: variables whose gradients are added in place.
    """
    for eqn in jaxpr.eqns:
        places = _places(eqn, same)
        if not places:
            continue
        if traits(eqn).passes:
            same.update(eqn.outvars)
        elif len(places) > 1 or not _suits(eqn, places[0], same, by_ref):
            return False
    return REFS_ARE_WHOLE or not any(v in same for v in _variables(jaxpr.outvars))


def _suits(eqn: Any, place: int, same: set[Var], by_ref: set[Var]) -> bool:
    """Tell whether an equation that reads a weight can add its gradient in place."""
    if not REFS_ARE_WHOLE and eqn.primitive.name == "slice":
        return False
    body = callee(eqn)
    if body is not None:
        within = {body.jaxpr.invars[place]}
        fits = _is_fit(body.jaxpr, within, _inner(eqn, body.jaxpr, by_ref))
        outs = zip(eqn.outvars, body.jaxpr.outvars, strict=True)
        same.update(v for v, out in outs if not isinstance(out, Literal) and out in within)
        return fits
    if eqn.primitive.name == "scan":
        (body,) = bodies(eqn)
        is_const, is_row = place < body.num_consts, place >= body.carry.stop
        consts = range(body.num_consts)
        keeps = is_row or (is_const and not _has_constant_steps(body.jaxpr, consts))
        before = eqn.invars[body.carry.stop if is_row else 0 : place]
        keeps = keeps and all(v in by_ref for v in _variables(before) if is_float(v.aval))
        inner = _inner(eqn, body.jaxpr, by_ref)
        return (REFS_ARE_WHOLE or keeps) and _is_fit(body.jaxpr, {body.jaxpr.invars[place]}, inner)
    if eqn.primitive.name == "cond":
        return all(
            _is_fit(
                b.jaxpr, {b.jaxpr.invars[place - b.first]}, _inner(eqn, b.jaxpr, by_ref, b.first)
            )
            for b in bodies(eqn)
        )
    return not jaxprs_of(eqn)


def _inner(eqn: Any, body: Any, outer: set[Var], first: int = 0) -> set[Var]:
    """Find the inputs of a body whose operands, counted from ``first``, are in ``outer``."""
    pairs = zip(eqn.invars[first:], body.invars, strict=False)
    return {inner for v, inner in pairs if not isinstance(v, Literal) and v in outer}


def _places(eqn: Any, variables: Collection[Var]) -> list[int]:
    return [n for n, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in variables]


def _variables(atoms: Collection[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _has_constant_steps(body: Any, constant: Collection[int]) -> bool:
    """Tell whether a scan's body has an equation that reads only constants.

    Args:
      constant: the indices of the body's inputs that are equal in every trip.
    """
    constants = {*body.constvars, *(body.invars[n] for n in constant)}
    for eqn in body.eqns:
        read = _variables(eqn.invars)
        if read and constants.issuperset(read):
            return True
        same = _places(eqn, constants)
        inner = callee(eqn)
        if eqn.primitive.name == "scan":
            (inner,) = bodies(eqn)
            same = [n for n in same if n < inner.num_consts]
        if inner is not None and _has_constant_steps(inner.jaxpr, same):
            return True
    return False
