"""Functions of one device inside a kernel that tracks varying types.

`jax.shard_map(..., check_vma=True)` tracks for every value the mesh axes over which it varies, and
requires that every operation does so too. Pallas kernels do not track them. Some functions of JAX
and flax mix varying values with values that do not vary: a new carry of a scan, a table of
positions. A function that exchanges nothing with other devices needs no such types. `local` traces
the function separately without these types, and gives the types back to its results.

Letters: A = the mesh axes over which any of the arguments varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from collectives.compat import (
    called,
    lowers_what_it_holds,
    typed_as,
    typeless,
    untyped,
    vary,
    varying_axes,
)

_CALLS = "jit", "closed_call"  # calls that only name a part of a program

F = TypeVar("F", bound=Callable[..., Any])


def local(f: F) -> F:
    """Make a function of arrays, which holds no collectives, run without varying types inside.

    Its results vary over A. Reverse-mode differentiation gives the gradients of ``f`` on this
    device. The gradient of an argument that varies over fewer axes than A is summed over the other
    axes, as in all of shard_map.

    If no surrounding `jax.shard_map` tracks types, or no argument varies, the result is a plain
    call of ``f``. Otherwise it is one equation, which `jax.checkpoint` computes again as a whole.
    It is not computed again if its gradient reads only arguments, constants, and values that ``f``
    has named (`jax.ad_checkpoint.checkpoint_name`) and a policy keeps.

    Args:
      f: a function that takes trees of arrays, by position, and returns one tree. It may call
        Pallas kernels; arrays that it closes over are constants, without a gradient.
    """

    def call(*args: Any) -> Any:
        axes = tuple(sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(args)))))
        # From here on all arguments vary alike; the transpose of this sums gradients over ranks.
        return _differentiable(f)(*vary(args, axes)) if axes else f(*args)

    return call  # type: ignore[return-value]


def _differentiable(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``f`` differentiable for arguments that all vary alike."""

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        return _apart(f, *args)

    def forward(*args: Any) -> Any:
        return _apart(lambda *args: jax.vjp(f, *args), *args)

    def backward(pullback: Any, cotangents: Any) -> Any:
        found = _apart(lambda pullback, c: _floats(pullback(c)), pullback, cotangents)
        return tuple(found)

    run.defvjp(forward, backward)
    return run


def _floats(tree: Any) -> Any:
    """Return cotangents with None for integers, whose cotangents no array can hold."""
    return jax.tree.map(lambda c: None if c.dtype == jax.dtypes.float0 else c, tree)


def _apart(f: Callable[..., Any], *args: Any) -> Any:
    """Evaluate a function as one equation; return arguments and constants unchanged.

    If two results are one value inside, they are one value outside, such as a residual that is also
    returned. A result that has a name inside has that name outside. With one equation, a
    transformation of the jaxpr never meets values without types.
    """
    given, treedef = jax.tree.flatten(args)

    def flat(*leaves: Any) -> Any:
        return f(*jax.tree.unflatten(treedef, leaves))

    with untyped():
        types = [typeless(jax.typeof(x)) for x in given]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*types)
    made = _call.bind(*closed.consts, *given, jaxpr=closed.jaxpr)
    jaxpr, names = closed.jaxpr, _names(closed.jaxpr)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *given), strict=True))
    outs = []
    for var, value in zip(jaxpr.outvars, made, strict=True):
        if isinstance(var, Literal):
            outs.append(value)
            continue
        if var not in known:
            known[var] = checkpoint_name(value, names[var]) if var in names else value
        outs.append(known[var])
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _names(jaxpr: Any) -> dict[Any, str]:
    """Find the names that `checkpoint_name` gave to variables, at any depth."""
    found: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            found[eqn.outvars[0]] = eqn.params["name"]
        elif eqn.primitive.name in _CALLS:
            body = called(eqn)
            inner = getattr(body, "jaxpr", body)
            given = _names(inner)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            found |= {outer: given[var] for outer, var in pairs if var in given}
    return found


def _closed(jaxpr: Any, values: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a jaxpr as a function, and its arguments; ``values`` are constants, then arguments."""
    count = len(jaxpr.constvars)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, values[:count])), values[count:]


def _run(*values: Any, jaxpr: Any) -> list[Any]:
    with untyped():
        f, args = _closed(jaxpr, [_erase.bind(x) if varying_axes(x) else x for x in values])
        return list(f(*args))


def _batched(values: Any, dims: Any, *, jaxpr: Any) -> Any:
    def f(*values: Any) -> Any:
        return jax.vmap(lambda *v: _run(*v, jaxpr=jaxpr), in_axes=dims)(*values)

    found = _apart(f, *values)
    return found, [0] * len(found)


_call, _erase = Primitive("local"), Primitive("erase_varying")
_call.multiple_results = True
lowers_what_it_holds(_call)
_call.def_impl(_run)
_call.def_effectful_abstract_eval(
    lambda *given, jaxpr: ([typed_as(v.aval, given) for v in jaxpr.outvars], jaxpr.effects)
)
mlir.register_lowering(_call, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_call] = _batched

_erase.def_impl(lambda x: x)
_erase.def_abstract_eval(typeless)
batching.defvectorized(_erase)
mlir.register_lowering(_erase, lambda _, x: [x])
