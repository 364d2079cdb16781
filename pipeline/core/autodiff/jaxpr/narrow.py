"""Inputs that a computation reads only in one narrower dtype, and their narrow copies.

A stage that computes in bfloat16 casts its float32 weights at every use, in every action. `read_in`
finds the weights that are read only by this cast. `with_copies` runs the computation on copies that
were cast before. Both follow parts and other layouts of an input, and the bodies of `jit`,
`jax.checkpoint` and `scan`. Any other equation reads the wide input.

A copy replaces only the value: its gradient is the gradient of the cast, summed in the wide dtype
as without the copy. So gradients are bitwise equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collectives.compat import loop_sizes
from pipeline.base.tree import Tree
from pipeline.core.autodiff.jaxpr.evaluate import bind, follow
from pipeline.core.autodiff.jaxpr.primitives import bodies, callee

Copies = Sequence[Any]  # for each input its narrow copy, or None
Pair = tuple[Any, Any]  # a value, and its narrow copy or None

_MOVES = frozenset(
    (
        "broadcast_in_dim",
        "copy",
        "dynamic_slice",
        "layout_constraint",
        "name",
        "pvary",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "transpose",
        "unstack",
    )
)
_CALLS = frozenset(("closed_call", "jit"))

# (narrow, wide) -> narrow, with the gradient of the cast from wide to narrow.
_narrowed = Primitive("narrowed")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    narrow, tangent = primals[0], tangents[1]
    if isinstance(tangent, ad.Zero):
        tangent = ad.instantiate_zeros(tangent)
    return narrow, jax.lax.convert_element_type(tangent, narrow.dtype)


def _batched(values: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    pairs = zip(values, dims, strict=True)
    return _narrowed.bind(*(batching.bdim_at_front(x, d, size) for x, d in pairs)), 0


_narrowed.def_impl(lambda narrow, _: narrow)
_narrowed.def_abstract_eval(lambda narrow, _: narrow)
ad.primitive_jvps[_narrowed] = _jvp
batching.primitive_batchers[_narrowed] = _batched
mlir.register_lowering(_narrowed, lambda _, narrow, wide: [narrow])  # noqa: ARG005


def read_in(jaxpr: Any) -> list[set[Any]]:
    """Find the dtypes to which each input of a jaxpr is cast; None for an uncast read."""
    dtypes: list[set[Any]] = [set() for _ in jaxpr.invars]

    def note(inputs: Sequence[int | None], dtype: Any = None) -> None:
        for index in inputs:
            if index is not None:
                dtypes[index].add(dtype)

    def equation(eqn: Any, inputs: list[int | None]) -> list[int | None]:
        nothing: list[int | None] = [None] * len(eqn.outvars)
        if all(index is None for index in inputs):
            return nothing
        kind = _kind(eqn, inputs)
        if kind == "move":
            return [inputs[0]] * len(eqn.outvars)
        if kind == "cast":
            note(inputs, eqn.params["new_dtype"])
        elif kind == "":
            note(inputs)
        else:
            results = read(bodies(eqn)[0].jaxpr, inputs)
            if kind == "call":
                return results
            note(results)
        return nothing

    def read(jaxpr: Any, inputs: Sequence[int | None]) -> list[int | None]:
        nothing: list[int | None] = [None] * len(jaxpr.constvars)
        return follow(jaxpr, inputs, nothing, lambda _: None, equation)

    note(read(jaxpr, range(len(jaxpr.invars))))
    return dtypes


def with_copies(f: Callable[..., Tree], copies: Copies) -> Callable[..., Tree]:
    """Make ``f`` read some leaves of its first argument from narrow copies.

    Args:
      copies: for each leaf of the first argument its narrow copy, or None.
    """

    def call(*args: Any) -> Tree:
        closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
        values = jax.tree.leaves(args)
        all_copies = [*copies, *[None] * (len(values) - len(copies))]
        results = _run(closed.jaxpr, closed.consts, list(zip(values, all_copies, strict=True)))
        return jax.tree.unflatten(jax.tree.structure(like), [value for value, _ in results])

    return call


def _kind(eqn: Any, copies: Sequence[Any]) -> str:
    """Classify an equation that reads operands with copies; ``copies`` has None for other operands.

    Returns:
      "cast"; "move" if it only moves the values of its operand; "call", "remat" or "scan" if its
      body can use copies; "" for any other equation.
    """
    name, params = eqn.primitive.name, eqn.params
    alone = copies[0] is not None and all(copy is None for copy in copies[1:])
    if name == "convert_element_type":
        plain = params.get("sharding") is None and not params["weak_type"]
        return "cast" if plain else ""
    if name in _MOVES:
        return "move" if alone else ""
    if name in _CALLS and callee(eqn) is not None:
        return "call"
    if name == "remat2":
        return "remat" if isinstance(params["prevent_cse"], bool) else ""
    if name == "scan":
        num_consts, num_carry = loop_sizes(eqn)
        carried = copies[num_consts : num_consts + num_carry]
        return "scan" if all(copy is None for copy in carried) else ""
    return ""


def _run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Pair]) -> list[Pair]:
    constants = [(value, None) for value in consts]
    return follow(jaxpr, inputs, constants, lambda literal: (literal.val, None), _equation)


def _equation(eqn: Any, reads: Sequence[Pair]) -> list[Pair]:
    values, copies = [value for value, _ in reads], [copy for _, copy in reads]
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        if any(copy is not None for copy in copies):
            kind = _kind(eqn, copies)
            if kind == "move":
                narrow = bind(eqn, copies[0], *values[1:])
                return list(zip(bind(eqn, *values), narrow, strict=True))
            if kind == "cast" and copies[0].dtype == eqn.params["new_dtype"]:
                return [(_narrowed.bind(copies[0], values[0]), None)]
            if kind == "call":
                body = bodies(eqn)[0]
                return _run(body.jaxpr, body.consts, reads)
            if kind in ("remat", "scan"):
                run = _rematerialized if kind == "remat" else _scanned
                return [(value, None) for value in run(eqn, values, copies)]
        return [(value, None) for value in bind(eqn, *values)]


def _rematerialized(eqn: Any, values: Sequence[Any], copies: Copies) -> list[Any]:
    """Run a `jax.checkpoint` on values with their copies."""
    body = bodies(eqn)[0]

    def run(values: Sequence[Any], copies: Copies) -> list[Any]:
        pairs = list(zip(values, copies, strict=True))
        return [value for value, _ in _run(body.jaxpr, body.consts, pairs)]

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(run, **options)(values, copies)


def _scanned(eqn: Any, values: Sequence[Any], copies: Copies) -> list[Any]:
    """Run a scan on values with their copies; its carry has no copies."""
    body, (num_consts, num_carry) = bodies(eqn)[0], loop_sizes(eqn)
    start = num_consts + num_carry
    constants = list(zip(values[:num_consts], copies[:num_consts], strict=True))

    def trip(carry: list[Any], rows: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        of_rows = zip(*rows, strict=True)
        inputs = [*constants, *((value, None) for value in carry), *of_rows]
        results = [value for value, _ in _run(body.jaxpr, body.consts, inputs)]
        return results[:num_carry], results[num_carry:]

    # Copies come last: jax 0.10 adds the gradient of a scanned array in place only if all earlier
    # ones are added in place (`pipeline.core.autodiff.in_place`), and copies have no gradient.
    rows = list(values[start:]), list(copies[start:])
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(trip, list(values[num_consts:start]), rows, **options)
    return [*carry, *stacked]


def is_narrower(dtype: Any, wide: Any) -> bool:
    """Tell whether a dtype is a float of 16 bits or more, but narrower than a float ``wide``."""
    floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return bool(floats) and 2 <= dtype.itemsize < wide.itemsize
