"""Which gradients ``jax.vjp(...).with_refs`` may add to a buffer as they are formed.

It goes wrong where the gradient of one weight is formed twice by one equation: under `jit` and in
the body of a scan one of the two sums is lost without a word (jax 0.10), a constant of a scan that
is also scanned over raises NotImplementedError (jax 0.12). And jax 0.10 crashes where a gradient
meets a static slice, a value that a body returns as it was given, or a scan whose body has
something that does not change from trip to trip: it is taken out of the loop, and the gradients of
all constants are confused. Such a gradient is formed by value, which costs a temporary of its size,
and added then.

What is a weight plus something has the weight's own gradient, and counts as the weight.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.extend.core import Literal

from collectives.compat import REFS_ARE_WHOLE
from pipeline.jaxpr.primitives import bodies, callee, held, traits

Var = Any


def can_be_added_in_place(jaxpr: Any, weight: Var) -> bool:
    """Whether every equation that reads a weight can add its part of the gradient to a ref.

    Args:
      jaxpr: of the function that is differentiated.
      weight: one of its inputs.
    """
    return _is_fit(jaxpr, {weight})


def is_formed_in_a_loop(jaxpr: Any, weight: Var) -> bool:
    """Whether a loop, or what is not looked into, reads a weight, and so adds up its gradient.

    Args: as of `can_be_added_in_place`.
    """
    same = {weight}
    for eqn in jaxpr.eqns:
        places = _places(eqn, same)
        if not places:
            continue
        within = bodies(eqn)
        if traits(eqn).loops or (held(eqn) and not within):
            return True
        if traits(eqn).passes:
            same.update(eqn.outvars)
        inner = ((body.jaxpr, body.jaxpr.invars[n - body.first]) for body in within for n in places)
        if any(is_formed_in_a_loop(*one) for one in inner):
            return True
    return False


def _is_fit(jaxpr: Any, same: set[Var]) -> bool:
    """As above; ``same`` are the variables with the weight's gradient, and gains those that are."""
    for eqn in jaxpr.eqns:
        places = _places(eqn, same)
        if not places:
            continue
        if traits(eqn).passes:
            same.update(eqn.outvars)
        elif len(places) > 1 or not _suits(eqn, places[0], same):
            return False
    return REFS_ARE_WHOLE or not any(v in same for v in _variables(jaxpr.outvars))


def _suits(eqn: Any, place: int, same: set[Var]) -> bool:
    """Whether an equation can, to which a weight is one operand."""
    if not REFS_ARE_WHOLE and eqn.primitive.name == "slice":
        return False
    body = callee(eqn)
    if body is not None:
        within = {body.jaxpr.invars[place]}
        fits = _is_fit(body.jaxpr, within)
        outs = zip(eqn.outvars, body.jaxpr.outvars, strict=True)
        same.update(v for v, out in outs if not isinstance(out, Literal) and out in within)
        return fits
    if eqn.primitive.name == "scan":
        (body,) = bodies(eqn)
        is_const, is_row = place < body.num_consts, place >= body.carry.stop
        consts = range(body.num_consts)
        keeps = is_row or (is_const and not _has_constant_steps(body.jaxpr, consts))
        return (REFS_ARE_WHOLE or keeps) and _is_fit(body.jaxpr, {body.jaxpr.invars[place]})
    if eqn.primitive.name == "cond":
        return all(_is_fit(b.jaxpr, {b.jaxpr.invars[place - b.first]}) for b in bodies(eqn))
    return not held(eqn)


def _places(eqn: Any, variables: Collection[Var]) -> list[int]:
    """Which operands of an equation are among some variables."""
    return [n for n, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in variables]


def _variables(atoms: Collection[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _has_constant_steps(body: Any, constant: Collection[int]) -> bool:
    """Whether a scan's body has an equation that reads constants and nothing else.

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
