"""A table of JAX's primitives and their traits, and functions for the jaxprs in equations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from collectives.compat import called, fixes_shardings, loop_sizes, varying_in

Eqn = Any

CHEAP, LIGHT, HEAVY = range(3)


@dataclass(frozen=True)
class Traits:
    """Traits of a primitive; a primitive that is not in the table counts as heavy.

    Attributes:
      cost: CHEAP for elementwise arithmetic and changes of layout, which XLA fuses into their
        readers; LIGHT for about one pass over memory, not worth a stash or a repetition; or HEAVY.
      moves: the result has its operand's values in another order or format.
      elementwise: each element of a result depends only on the operands' elements at its index.
      carries: all values of the results are values of the operands; or the primitive reads or
        writes a ref.
      identity: the results equal the operands, one by one.
      part: the result is a part of its operand.
      combines: the primitive computes one value from two, such as a sum over layers.
      passes: an operand's gradient is the result's gradient, or its negative.
      loops: the primitive runs a body repeatedly.
      calls: the primitive calls a function once, with its operands.
      remat: the primitive calls a function that is computed again later (`jax.checkpoint`).
      hlo: the collective to which the primitive is compiled; empty for other primitives.
    """

    cost: int = HEAVY
    moves: bool = field(default=False, kw_only=True)
    elementwise: bool = field(default=False, kw_only=True)
    carries: bool = field(default=False, kw_only=True)
    identity: bool = field(default=False, kw_only=True)
    part: bool = field(default=False, kw_only=True)
    writes: bool = field(default=False, kw_only=True)
    combines: bool = field(default=False, kw_only=True)
    passes: bool = field(default=False, kw_only=True)
    loops: bool = field(default=False, kw_only=True)
    calls: bool = field(default=False, kw_only=True)
    remat: bool = field(default=False, kw_only=True)
    hlo: str = field(default="", kw_only=True)


# Reads and writes of parts of arrays are light, even a scatter with a jaxpr that combines values.
_TABLE = {
    "abs ceil clamp div eq exp exp2 floor ge gt integer_pow is_finite le logistic lt mul ne neg "
    "not round rsqrt sign sqrt square tanh xor": Traits(CHEAP, elementwise=True),
    "and max min or": Traits(CHEAP, elementwise=True, combines=True),
    "add add_any sub": Traits(CHEAP, elementwise=True, combines=True, passes=True),
    "select_n": Traits(CHEAP, elementwise=True, carries=True),
    "convert_element_type": Traits(CHEAP, elementwise=True, moves=True, passes=True),
    "copy": Traits(
        CHEAP, elementwise=True, moves=True, carries=True, identity=True, passes=True
    ),
    "stop_gradient": Traits(CHEAP, elementwise=True, moves=True, identity=True),
    "layout_constraint pvary": Traits(CHEAP, moves=True, carries=True, identity=True),
    "broadcast_in_dim reshape rev squeeze transpose": Traits(CHEAP, moves=True, carries=True),
    "reduce_precision": Traits(CHEAP, moves=True),
    "slice split unstack": Traits(CHEAP, carries=True, part=True),
    "concatenate pad stack": Traits(CHEAP, carries=True),
    "empty empty2": Traits(CHEAP, carries=True),
    "iota one_minus_square platform_index polynomial": Traits(CHEAP),
    "acos acosh asin asinh atan atanh cbrt cos cosh erf expm1 log log1p log2 pow sin sinh "
    "tan": Traits(LIGHT, elementwise=True),
    "erf_inv erfc": Traits(LIGHT),
    "atan2 nextafter rem": Traits(LIGHT, elementwise=True),
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum random_bits random_fold_in "
    "random_seed random_split random_unwrap random_wrap reduce reduce_and reduce_max reduce_min "
    "reduce_or reduce_prod reduce_sum scatter scatter-add threefry2x32": Traits(LIGHT),
    "axis_index bitcast_convert_type lt_to population_count shift_left shift_right_arithmetic "
    "shift_right_logical": Traits(LIGHT),
    "dynamic_slice gather": Traits(LIGHT, carries=True, part=True),
    "dynamic_update_slice": Traits(LIGHT, carries=True),
    "optimization_barrier": Traits(
        CHEAP, carries=True, identity=True, passes=True
    ),
    "name": Traits(CHEAP, moves=True, carries=True, identity=True, passes=True),
    "narrowed": Traits(CHEAP, moves=True, carries=True, passes=True),
    "sharding_constraint": Traits(identity=True),
    "get": Traits(carries=True),
    "swap": Traits(carries=True, writes=True),
    "addupdate": Traits(writes=True),
    "scan while": Traits(loops=True),
    "call_hi_primitive closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit": Traits(
        calls=True
    ),
    "remat2": Traits(calls=True, remat=True),
    "pmax pmin psum psum_invariant": Traits(hlo="all-reduce"),
    "all_gather all_gather_invariant": Traits(hlo="all-gather"),
    "all_to_all": Traits(hlo="all-to-all"),
    "ppermute": Traits(hlo="collective-permute"),
    "reduce_scatter": Traits(hlo="reduce-scatter"),
}  # fmt: skip
_TRAITS = {name: of_name for names, of_name in _TABLE.items() for name in names.split()}
_UNKNOWN = Traits()


def traits(eqn: Eqn) -> Traits:
    return _TRAITS.get(eqn.primitive.name, _UNKNOWN)


def names() -> frozenset[str]:
    return frozenset(_TRAITS)


def is_cheap(eqn: Eqn) -> bool:
    """Tell whether recomputing an equation costs little compared with reading its result."""
    if traits(eqn).calls and not traits(eqn).remat:
        body = body_of(eqn)
        return body is not None and all(map(is_cheap, body.jaxpr.eqns))
    return traits(eqn).cost == CHEAP


def is_ref(aval: Any) -> bool:
    return isinstance(aval, jax.ref.AbstractRef)


def barrier(*values: Any) -> list[Any]:
    """Apply `jax.lax.optimization_barrier`, and keep each value's varying axes.

    JAX makes all operands of one barrier vary over one set of axes.
    """
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(varying_in(value), []).append(index)
    results = list(values)
    for indices in groups.values():
        outs = jax.lax.optimization_barrier([values[index] for index in indices])
        for index, value in zip(indices, outs, strict=True):
            results[index] = value
    return results


# --- jaxprs in equations ---


@dataclass(frozen=True)
class Body:
    """A jaxpr within an equation. Its input n is the equation's operand ``first + n``.

    Attributes:
      first: the index of the operand that is its first input.
      num_consts: in a loop, the number of leading inputs that are equal in every trip.
      num_carry: in a loop, the number of next inputs, which are results of the previous trip; all
        further inputs are slices.
    """

    jaxpr: Any
    consts: Sequence[Any] = ()
    first: int = 0
    num_consts: int = 0
    num_carry: int = 0

    @property
    def carry(self) -> range:
        """The indices of inputs that are carried from trip to trip."""
        return range(self.num_consts, self.num_consts + self.num_carry)


def bodies(eqn: Eqn) -> list[Body]:
    """List the bodies that `scan`, `while` (without its test), `cond` and calls run; else []."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            num_consts, num_carry = loop_sizes(eqn)
            return [_body(params["jaxpr"], num_consts=num_consts, num_carry=num_carry)]
        case "while":
            first, num_consts = params["cond_nconsts"], params["body_nconsts"]
            num_carry = len(eqn.invars) - first - num_consts
            return [_body(params["body_jaxpr"], first, num_consts, num_carry)]
        case "cond":
            return [_body(branch, first=1) for branch in params["branches"]]
    body = body_of(eqn)
    return [] if body is None else [body]


def body_of(eqn: Eqn) -> Body | None:
    """Return the body that an equation calls once, with its operands; None if there is no body."""
    return _body(called(eqn)) if traits(eqn).calls else None


def callee(eqn: Eqn) -> Body | None:
    """Return the body that an equation only calls; None for a `jit` that fixes shardings."""
    return None if fixes_shardings(eqn) else body_of(eqn)


def jaxprs_of(eqn: Eqn) -> list[Any]:
    body = body_of(eqn)
    return list(jaxprs_in_params(eqn.params)) if body is None else [body.jaxpr]


def makes_ref(jaxpr: Any) -> bool:
    """Tell whether a jaxpr makes a mutable buffer (`jax.new_ref`), also within loops and calls.

    The buffers of a Pallas kernel do not count: they are its operands.
    """
    return any(
        any(is_ref(var.aval) for var in eqn.outvars) or any(map(makes_ref, jaxprs_of(eqn)))
        for eqn in jaxpr.eqns
        if eqn.primitive.name != "pallas_call"
    )


def barred(eqn: Eqn) -> Sequence[bool]:
    """Mark the operands of a call that must not be merged with earlier equal values.

    These are the operands from which `jax.checkpoint` repeats its computation.
    """
    params, count = eqn.params, len(eqn.invars)
    if not traits(eqn).remat or not params["differentiated"]:
        return (False,) * count
    prevent: bool | Sequence[bool] = params["prevent_cse"]
    return (prevent,) * count if isinstance(prevent, bool) else prevent


def _body(closed: Any, first: int = 0, num_consts: int = 0, num_carry: int = 0) -> Body:
    """Make the `Body` of a jaxpr, closed or open."""
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    return Body(jaxpr, consts, first, num_consts, num_carry)


def equations(jaxpr: Any) -> Iterator[Eqn]:
    """Yield all equations in order, with called bodies in place of their calls."""
    for eqn in jaxpr.eqns:
        body = callee(eqn)
        if body is None:
            yield eqn
        else:
            yield from equations(body.jaxpr)
