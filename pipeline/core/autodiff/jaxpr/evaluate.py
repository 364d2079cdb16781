"""Functions that read and run parts of a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.extend.core import Literal

from pipeline.core.autodiff.jaxpr.primitives import Body, bodies, jaxprs_of, traits

Var = Any
Eqn = Any
T = TypeVar("T")


def producers(jaxpr: Any) -> dict[Var, Eqn]:
    """Map each variable to the equation that computes it."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def operands(eqn: Eqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def follow(
    jaxpr: Any,
    inputs: Iterable[T],
    constants: Iterable[T],
    literal: Callable[[Any], T],
    equation: Callable[[Eqn, list[T]], Iterable[T]],
) -> list[T]:
    """Interpret an open jaxpr on abstract values, equation by equation, and return its results.

    ``inputs`` and ``constants`` are the abstract values of its inputs and constvars. ``literal``
    maps a literal to its abstract value, ``equation`` an equation and its operands' values to its
    results.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update(zip(jaxpr.constvars, constants, strict=True))

    def look_up(atom: Any) -> T:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [look_up(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [look_up(atom) for atom in jaxpr.outvars]


def bind(eqn: Eqn, *values: Any) -> list[Any]:
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate(
    jaxpr: Any, values: dict[Var, Any], wanted: Iterable[Any], *, effects: bool = False
) -> list[Any]:
    """Compute the wanted variables of a jaxpr; run only the equations that they need.

    ``values`` has the known values, from which all wanted variables follow. An equation whose
    results are known is not run. With ``effects``, every equation with an effect (a print) is run.
    """
    env, wanted = dict(values), list(wanted)
    made_by = producers(jaxpr)
    needed: set[int] = set()
    frontier = [v for v in wanted if not isinstance(v, Literal)]
    for eqn in jaxpr.eqns:
        if effects and eqn.effects:
            needed.add(id(eqn))
            frontier += operands(eqn)
    while frontier:
        var = frontier.pop()
        if var not in env and id(made_by[var]) not in needed:
            needed.add(id(made_by[var]))
            frontier += operands(made_by[var])

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        if id(eqn) in needed:
            for var, value in zip(eqn.outvars, bind(eqn, *map(read, eqn.invars)), strict=True):
                env.setdefault(var, value)
    return [read(atom) for atom in wanted]


def narrows(jaxpr: Any) -> bool:
    """Tell whether a jaxpr, at any depth, computes floats with fewer exponent bits than float32.

    In such floats (float16, and the kinds of float8) a gradient may vanish or overflow, so a loss
    must be scaled before it is differentiated, not after. bfloat16 has as many exponent bits as
    float32. Values that are only moved, such as inputs stored in float16, do not count.
    """
    for eqn in jaxpr.eqns:
        bodies = jaxprs_of(eqn)
        if any(map(narrows, bodies)):
            return True
        is_work = not bodies and not traits(eqn).carries
        if is_work and any(_is_narrow(var.aval) for var in eqn.outvars):
            return True
    return False


def _is_narrow(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    finfo: Any = jnp.finfo
    is_real = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_real and bool(finfo(dtype).nexp < _EXPONENT_BITS)


_EXPONENT_BITS = 8  # of float32


def forwarded(jaxpr: Any) -> list[int | None]:
    """Map each result to the operand that it forwards; None for a computed result.

    A call with its own trace (`jax.jit`, `jax.checkpoint`, a scan) returns new values for all
    results, even for operands that its body returns unchanged.
    """

    def equation(eqn: Any, reads: list[int | None]) -> list[int | None]:
        return [None if operand is None else reads[operand] for operand in _operands_of(eqn)]

    inputs, none = range(len(jaxpr.invars)), [None] * len(jaxpr.constvars)
    return follow(jaxpr, inputs, none, lambda _: None, equation)


def _operands_of(eqn: Any) -> Sequence[int | None]:
    """Map each result of an equation to the operand that it forwards."""
    if traits(eqn).identity:
        return range(len(eqn.outvars))
    candidates = [_of_body(body) for body in bodies(eqn)] or [[None] * len(eqn.outvars)]
    return [each[0] if len(set(each)) == 1 else None for each in zip(*candidates, strict=True)]


def _of_body(body: Body) -> list[int | None]:
    """Map results to forwarded operands: in a loop, unchanged carries and whole stacks."""
    inner, carry = forwarded(body.jaxpr), body.carry
    carried = [i if i == place else None for place, i in zip(carry, inner, strict=False)]
    rows = [None if i is None or i < carry.stop else i for i in inner[len(carry) :]]
    return [None if i is None else i + body.first for i in (*carried, *rows)]
