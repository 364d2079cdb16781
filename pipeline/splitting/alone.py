"""A test that blocks compute the same alone and within the model's own call.

A stage calls blocks without the model around them. A model may set a context variable or a scope
such as `jax.default_matmul_precision`, or a wrapper of the whole model may insert adapters. So each
block is traced again alone. Both traces are compared equation by equation, and so are the pullbacks
of equations with custom derivative rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import Literal, jaxprs_in_params

from pipeline.facade import bind
from pipeline.splitting.recording import Call, Slots, dotted, member
from pipeline.splitting.regular import Regular
from pipeline.splitting.tracing import Recipe, Trace, types_of_state

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_COMPARED = 2**16  # bytes of a constant; larger ones are equal if they are one array


def find_changed(model: nnx.Module, trace: Trace, regular: Regular) -> str:
    """Find a block that computes otherwise alone than in the model; return the reason, else ""."""
    interned: dict[Any, int] = {}
    for number, call in enumerate(trace.calls):
        own, alone = (trace, number), _trace_alone(model, call, call.types)
        if alone is None or _meaning(*own, own, interned) != _meaning(alone, 0, own, interned):
            return (
                f"{dotted(call.path)} computes something else by itself than within the model's "
                f"call, which sets something around it (a context, a precision, an adapter)"
            )
        kinds = [kind for kind, _ in regular.templates[number].sources]
        sent = [
            one if kind == "side" else jax.ShapeDtypeStruct(one.shape, one.dtype)
            for one, kind in zip(call.types, kinds, strict=True)
        ]
        if sent != [*call.types]:
            strong = _trace_alone(model, call, sent)
            if strong is None or _dtypes(strong) != _dtypes(alone):
                return (
                    f"{dotted(call.path)} is given a weakly typed value, and computes in other "
                    f"dtypes on what a stage receives, which has the same dtype, not weak: give "
                    f"the value a dtype where it is made (dtype=, astype)"
                )
    return ""


def _dtypes(trace: Trace) -> list[Any]:
    """List the dtypes of all results, without casts that keep the dtype."""

    def of(eqns: Iterable[Any]) -> Iterator[Any]:
        for eqn in eqns:
            dtypes = [str(getattr(var.aval, "dtype", "")) for var in eqn.outvars]
            if eqn.primitive.name != "convert_element_type" or dtypes != [
                str(atom.aval.dtype) for atom in eqn.invars
            ]:
                yield eqn.primitive.name, dtypes
            for body in jaxprs_in_params(eqn.params):
                yield from of(body.eqns)

    return list(of(one.eqn for one in trace.equations))


def _trace_alone(model: nnx.Module, call: Call, types: Sequence[Any]) -> Trace | None:
    """Trace a call of a block by itself, on inputs of some types; None if the trace fails."""

    def run(block: Any, *values: Any) -> Any:
        args, kwargs = call.given.fill(values)
        return block(*args, **kwargs)

    count = call.given.values
    treedef = jax.tree.structure(((0,) * count, {}))
    names = tuple(f"args[{n}]" for n in range(count))
    slots = Slots(treedef, (None,) * count)
    # Split the block from the model: a merge of the whole model for each block is quadratic.
    graphdef, state = nnx.split(member(model, call.path))
    alone = Recipe(graphdef, types_of_state(state), run, slots, names, ((),))
    try:
        found = alone.trace(types)
    except Exception:  # noqa: BLE001  the block may need a value that only the model sets
        return None
    return found if len(found.calls) == 1 else None


def _meaning(
    trace: Trace, number: int, like: tuple[Trace, int], interned: dict[Any, int]
) -> tuple[list[Any], list[Any]] | None:
    """Return a call's results and final variables as terms of its arguments and variables.

    ``like`` is another trace and the number of a call in it. Where that call gets one value twice,
    the two values here are taken to be equal too. ``interned`` maps equations to numbers; this
    function adds to it.
    """
    before, after = trace.held[number]
    own = [*trace.given[number], *before]
    other = [*like[0].given[like[1]], *like[0].held[like[1]][0]]
    if len(own) != len(other):
        return None
    first: dict[Any, int] = {}
    names = [first.setdefault(id(atom), n) for n, atom in enumerate(other)]
    terms: dict[Any, Any] = {}
    for atom, value, name in zip(own, other, names, strict=True):
        if not isinstance(atom, Literal):
            is_known = isinstance(value, Literal)  # the model gives the block a number
            terms.setdefault(atom, _literal(value) if is_known else ("given", name))
    for path, held in trace.state.items():
        for n, var in enumerate(held):
            terms.setdefault(var, ("state", path, n))
    for var, value in trace.constants.items():
        terms.setdefault(var, _constant(value))

    def term(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return _literal(atom)
        return terms.get(atom, ("outside", id(atom)))

    for one in trace.equations:
        if one.call != number:
            continue
        eqn = one.eqn
        key = (
            eqn.primitive.name,
            _params(eqn.params),
            _own_derivative(eqn),
            tuple(map(term, one.reads)),
        )
        made = interned.setdefault(key, len(interned))
        terms.update((var, ("made", made, n)) for n, var in enumerate(eqn.outvars))
    return list(map(term, trace.returned[number])), list(map(term, after))


def _literal(atom: Literal) -> Any:
    return "literal", str(atom.aval), repr(atom.val)


def _own_derivative(eqn: Any) -> Any:
    """Return the pullback of an equation with a rule of its own (`jax.custom_vjp`), else None.

    A rule may close over a value that the model sets around its blocks. The parameters of an
    equation show the rule only as a function.
    """
    if not _has_rule(eqn):
        return None
    inputs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]

    def run(*values: Any) -> list[jax.Array]:
        return [y for y in bind(eqn, *values) if jax.numpy.issubdtype(y.dtype, jax.numpy.inexact)]

    def pullback(*values: Any) -> Any:
        found, back = jax.vjp(run, *values)
        return back(list(map(jax.numpy.ones_like, found)))

    try:
        return _params(jax.make_jaxpr(pullback)(*inputs))
    except Exception:  # noqa: BLE001  it has no pullback
        return None


def _has_rule(eqn: Any) -> bool:
    return eqn.primitive.name in _RULES or any(
        _has_rule(one) for body in jaxprs_in_params(eqn.params) for one in body.eqns
    )


def _constant(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except TypeError:  # a random key
        return "constant", id(value)
    if array.nbytes > _COMPARED:
        return "constant", id(value)
    return "constant", str(array.dtype), array.shape, array.tobytes()


def _params(params: Any) -> Any:
    """Return parameters of an equation in a form that is equal for two traces of one function."""
    if isinstance(params, Mapping):
        return tuple((key, _params(params[key])) for key in sorted(params))
    if isinstance(params, Sequence) and not isinstance(params, str):
        return tuple(map(_params, params))
    if hasattr(params, "consts"):
        return _ADDRESS.sub("", str(params)), tuple(map(_constant, params.consts))
    if callable(params) and not hasattr(params, "jaxpr"):  # a rule: every trace makes a new one
        return "function"
    return _ADDRESS.sub("", str(params))
