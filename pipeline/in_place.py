"""Which gradients ``jax.vjp(...).with_refs`` may add to a buffer as they are formed.

It goes wrong where one weight reaches an equation twice: under `jit` and in the body of a scan one
of the two sums is lost without a word (jax 0.10), a constant of a scan that is also scanned over
raises NotImplementedError (jax 0.12). And jax 0.10 crashes where a gradient meets a static slice,
a value that a body returns as it was given, or a scan in whose body a weight meets nothing that
changes from trip to trip: that product is taken out of the loop. Such a gradient is formed by
value, which costs a temporary of its size, and added then.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Literal

from pipeline.primitives import callee, loop_sizes

Var = Any
_REFS_ARE_WHOLE = jax.__version_info__ >= (0, 12)  # of what goes wrong, only the first remains


def can_be_added_in_place(jaxpr: Any, weight: Var) -> bool:
    """Whether every equation that reads a weight can add its part of the gradient to a ref.

    Args:
      jaxpr: of the function that is differentiated.
      weight: one of its inputs.
    """
    return _is_fit(jaxpr, weight, None)


def _is_fit(jaxpr: Any, weight: Var, changing: set[Var] | None) -> bool:
    """As above; within a scan's body, ``changing`` is what changes from trip to trip."""
    if not _REFS_ARE_WHOLE and any(v is weight for v in jaxpr.outvars):
        return False
    for eqn in jaxpr.eqns:
        if changing is not None and any(v in changing for v in _variables(eqn)):
            changing.update(eqn.outvars)
        places = [n for n, v in enumerate(eqn.invars) if v is weight]
        if not places:
            continue
        if len(places) > 1 or not _suits(eqn, places[0], changing):
            return False
    return True


def _suits(eqn: Any, place: int, changing: set[Var] | None) -> bool:
    """Whether an equation can, to which a weight is one operand."""
    if not _REFS_ARE_WHOLE:
        is_hoisted = changing is not None and not any(v in changing for v in _variables(eqn))
        if is_hoisted or eqn.primitive.name == "slice":
            return False
    body, _ = callee(eqn)
    if body is not None:
        return _inside(body, place, _marked(eqn, changing))
    if eqn.primitive.name == "scan":
        num_consts, num_carry = loop_sizes(eqn)
        if num_consts <= place < num_consts + num_carry:
            return _REFS_ARE_WHOLE
        return _inside(eqn.params["jaxpr"], place, set(range(num_consts, len(eqn.invars))))
    if eqn.primitive.name == "cond":
        marked = _marked(eqn, changing, 1)
        return all(_inside(b, place - 1, marked) for b in eqn.params["branches"])
    return not any(_holds_a_body(value) for value in eqn.params.values())


def _inside(body: Any, place: int, marked: set[int] | None) -> bool:
    body = getattr(body, "jaxpr", body)
    changing = None if marked is None else {body.invars[n] for n in marked}
    return _is_fit(body, body.invars[place], changing)


def _marked(eqn: Any, changing: set[Var] | None, start: int = 0) -> set[int] | None:
    """Which inputs of a body change from trip to trip of the scan around it."""
    if changing is None:
        return None
    return {
        n for n, v in enumerate(eqn.invars[start:]) if not isinstance(v, Literal) and v in changing
    }


def _variables(eqn: Any) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _holds_a_body(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return any(hasattr(getattr(part, "jaxpr", part), "eqns") for part in parts)
