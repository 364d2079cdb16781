"""Reading and running parts of a jaxpr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Literal

Var = Any
Eqn = Any

# Elementwise arithmetic and changes of layout: XLA fuses them into what reads them.
# fmt: off
_CHEAP = frozenset(
    (
        "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate",
        "convert_element_type", "copy", "copy_p", "div", "eq", "exp", "exp2", "expand_dims",
        "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "logistic", "lt",
        "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pad", "pvary",
        "reduce_precision", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "slice",
        "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose",
        "unstack", "xor",
    )
)
# fmt: on
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call"))


def is_cheap(eqn: Eqn) -> bool:
    """Whether computing an equation again costs next to nothing beside reading its result."""
    if eqn.primitive.name in _CALLS:
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return body is not None and all(map(is_cheap, body.eqns))
    return eqn.primitive.name in _CHEAP


def producers(jaxpr: Any) -> dict[Var, Eqn]:
    """The equation that makes each variable."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def operands(eqn: Eqn) -> list[Var]:
    """The variables an equation reads."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def evaluate(
    jaxpr: Any, known: dict[Var, Any], wanted: Iterable[Any], *, effects: bool = False
) -> list[Any]:
    """Values of some variables of a jaxpr, running only the equations they need.

    ``known`` gives enough values to start from; an equation whose results are known is not run.
    With ``effects`` every equation that has one (a print) is run too.
    """
    env, wanted = dict(known), list(wanted)
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
            with eqn.ctx.manager:
                found = eqn.primitive.bind(
                    *map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params)
                )
            found = found if eqn.primitive.multiple_results else [found]
            for var, value in zip(eqn.outvars, found, strict=True):
                env.setdefault(var, value)
    return [read(atom) for atom in wanted]
