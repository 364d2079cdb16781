"""What is known of JAX's primitives: what they cost, what they hold, what differs by release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from collectives.compat import fixes_shardings, varying_in

Eqn = Any

# Elementwise arithmetic and changes of layout: XLA fuses them into what reads them.
# fmt: off
_CHEAP = frozenset(
    (
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate",
        "convert_element_type", "copy", "copy_p", "div", "empty2", "eq", "exp", "exp2",
        "expand_dims", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "logistic",
        "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pad", "pvary",
        "reduce_precision", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "slice",
        "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose",
        "unstack", "xor",
    )
)
# One pass over memory, or little more: not worth a stash, nor doing twice.
_LIGHT = frozenset(
    (
        "argmax", "argmin", "atan2", "axis_index", "bitcast_convert_type", "cbrt", "cos",
        "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "erf", "erf_inv", "erfc", "expm1",
        "log", "log1p", "nextafter", "population_count", "pow", "random_bits", "random_fold_in",
        "random_seed", "random_split", "random_unwrap", "random_wrap", "reduce_and", "reduce_max",
        "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "rem", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sin", "tan", "threefry2x32",
    )
)
# Parts of arrays, taken or put: light, and they fuse into what reads them.
_PICKS = frozenset(("dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add"))
# The same numbers elsewhere, or in another format.
_MOVES = frozenset(
    (
        "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "pvary",
        "reduce_precision", "reshape", "rev", "squeeze", "stop_gradient", "transpose",
    )
)
# Each number of the result is made of the operands' numbers at its place.
_ELEMENTWISE = frozenset(
    (
        "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type",
        "copy", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
        "ne", "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign",
        "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    )
)
# The same numbers in the same format, whole or in part, and what reads and writes refs.
_CARRIES = frozenset(
    (
        "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice",
        "dynamic_update_slice", "empty2", "expand_dims", "gather", "get", "optimization_barrier",
        "pad", "pvary", "reshape", "rev", "select_n", "slice", "split", "squeeze", "swap",
        "transpose", "unstack",
    )
)
# The same numbers, for each operand.
_IDENTITIES = frozenset(
    ("copy", "copy_p", "layout_constraint", "name", "optimization_barrier", "pvary",
     "sharding_constraint", "stop_gradient")
)
# fmt: on
_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
)
_REMATS = frozenset(("remat", "remat2", "checkpoint"))

CHEAP, LIGHT, HEAVY = range(3)


def is_cheap(eqn: Eqn) -> bool:
    """Whether computing an equation again costs next to nothing beside reading its result."""
    if eqn.primitive.name in _CALLS:
        body = body_of(eqn)
        return body is not None and all(map(is_cheap, body.eqns))
    return eqn.primitive.name in _CHEAP


def cost_of(eqn: Eqn) -> int:
    """CHEAP, LIGHT or HEAVY; everything unknown is heavy."""
    name = eqn.primitive.name
    if name in _CHEAP:
        return CHEAP
    if name in _LIGHT or name in _PICKS:
        # Some hold a jaxpr: what a scatter combines with.
        return LIGHT
    return HEAVY


def moves(eqn: Eqn) -> bool:
    """Whether an equation only moves or reformats its operand."""
    return eqn.primitive.name in _MOVES


def is_elementwise(eqn: Eqn) -> bool:
    """Whether each number of a result is made of the operands' numbers at its place."""
    return eqn.primitive.name in _ELEMENTWISE


def carries(eqn: Eqn) -> bool:
    """Whether an equation makes no number that its operands do not hold."""
    return eqn.primitive.name in _CARRIES


def is_identity(eqn: Eqn) -> bool:
    """Whether an equation's results are its operands, one by one."""
    return eqn.primitive.name in _IDENTITIES


def is_ref(aval: Any) -> bool:
    """Whether a type is that of a mutable buffer."""
    return isinstance(aval, jax.ref.AbstractRef)


def barrier(*values: Any) -> list[Any]:
    """`jax.lax.optimization_barrier` that leaves to each value the axes it varies over.

    JAX makes all operands of one barrier vary alike.
    """
    kept: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        kept.setdefault(varying_in(value), []).append(index)
    held = list(values)
    for indices in kept.values():
        found = jax.lax.optimization_barrier([values[index] for index in indices])
        for index, value in zip(indices, found, strict=True):
            held[index] = value
    return held


def callee(eqn: Eqn) -> tuple[Any, Sequence[bool]]:
    """The jaxpr that an equation merely calls, or None; and which operands must not be merged.

    A jit that fixes shardings is not mere. `jax.checkpoint` bars those operands from which it
    computes for the second time.
    """
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.invars)
    barred: Sequence[bool] = (False,) * count
    if name in _REMATS:
        prevent = params["prevent_cse"] if params["differentiated"] else False
        barred = (prevent,) * count if isinstance(prevent, bool) else prevent
    elif name not in _CALLS or fixes_shardings(eqn):
        return None, barred
    return body_of(eqn), barred


def body_of(eqn: Eqn) -> Any:
    """The jaxpr that an equation calls once, with its operands; None if it does not."""
    if eqn.primitive.name not in _CALLS | _REMATS:
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
