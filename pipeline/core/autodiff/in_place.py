"""The gradients that ``jax.vjp(...).with_refs`` may add to a buffer as they are formed.

It goes wrong where the gradient of one weight is formed twice by one equation: under `jit` and in
the body of a scan one of the two sums is lost without a word (jax 0.10), a constant of a scan that
is also scanned over raises NotImplementedError (jax 0.12). And jax 0.10 crashes where a gradient
meets a static slice, a value that a body returns as it was given, or a scan whose body has
something that does not change from trip to trip: it is taken out of the loop, and the gradients of
all constants are confused. They are too where a constant of a scan whose gradient is a value comes
before one whose gradient is added to a ref, and so are those of what is scanned over. Such a
gradient is formed by value, which costs a temporary of its size, and added then.

What is a weight plus something has the weight's own gradient, and counts as the weight.
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
    """The weights of which every reader can add its part of the gradient to a ref.

    Args:
      jaxpr: of the function that is differentiated.
      weights: inputs of it.
    """
    by_ref = set(weights)
    while True:  # whether one can depends on whether others are
        fit = {v for v in weights if v in by_ref and _is_fit(jaxpr, {v}, by_ref)}
        if fit == by_ref:
            return fit
        by_ref = fit


def is_formed_in_a_loop(jaxpr: Any, weight: Var) -> bool:
    """Tell whether a loop, or an opaque equation, reads a weight and so adds up its gradient.

    Args:
      jaxpr: of the function that is differentiated.
      weight: one of its inputs.
    """
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
      jaxpr: of a function.
      same: variables with the weight's gradient, which gains those that are.
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
    """The inputs of a body that are variables of some outside; of operands from the first on."""
    pairs = zip(eqn.invars[first:], body.invars, strict=False)
    return {inner for v, inner in pairs if not isinstance(v, Literal) and v in outer}


def _places(eqn: Any, variables: Collection[Var]) -> list[int]:
    """Positions of an equation's operands that are among some variables."""
    return [n for n, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in variables]


def _variables(atoms: Collection[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _has_constant_steps(body: Any, constant: Collection[int]) -> bool:
    """Tell whether a scan's body has an equation that reads constants and nothing else.

    Args:
      body: a jaxpr.
      constant: which of its inputs are the same in every trip.
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
