"""Which results of a traced function are operands of it, handed back as they are.

A call that JAX traces by itself (`jax.jit`, `jax.checkpoint`, a scan) returns new values for
everything, also for what its body only passes through. The jaxpr says which those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from collectives.compat import loop_sizes
from pipeline.jaxpr.primitives import body_of, is_identity


def forwarded(jaxpr: Any) -> list[int | None]:
    """For each result, the index of the operand that it is; None where it is computed."""
    known: dict[Any, int] = {var: index for index, var in enumerate(jaxpr.invars)}

    def look_up(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, _operands(eqn), strict=True):
            found = None if operand is None else look_up(eqn.invars[operand])
            if found is not None:
                known[var] = found
    return list(map(look_up, jaxpr.outvars))


def _operands(eqn: Any) -> Sequence[int | None]:
    """For each result of an equation, the index of the operand that it is."""
    if is_identity(eqn):
        return range(len(eqn.outvars))
    if (body := body_of(eqn)) is not None:
        return forwarded(getattr(body, "jaxpr", body))
    match eqn.primitive.name:
        case "scan":
            consts, carried = loop_sizes(eqn)
            inner = forwarded(eqn.params["jaxpr"].jaxpr)
            kept = _unchanged(inner[:carried], consts)
            rows = [i if i is not None and i >= consts + carried else None for i in inner[carried:]]
            return [*kept, *rows]
        case "while":
            of_test, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            inner = forwarded(eqn.params["body_jaxpr"].jaxpr)
            return [None if i is None else i + of_test for i in _unchanged(inner, consts)]
        case "cond":
            branches = [forwarded(branch.jaxpr) for branch in eqn.params["branches"]]
            return [
                found[0] + 1 if found[0] is not None and len(set(found)) == 1 else None
                for found in zip(*branches, strict=True)
            ]
    return [None] * len(eqn.outvars)


def _unchanged(carry: Sequence[int | None], consts: int) -> list[int | None]:
    """What a loop carries from trip to trip without a change."""
    return [i if i == consts + place else None for place, i in enumerate(carry)]
