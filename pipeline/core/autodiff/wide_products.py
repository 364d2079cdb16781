"""Products that are summed in float32, made in float32 where they were rounded to 16 bits between.

A weight in float32 that a stage reads in bfloat16 gets a gradient in bfloat16: the product is
rounded, widened again, and then added to its float32 sum. XLA for GPUs compiles that as two
kernels: the second reads the product and the sum and writes the sum. If the product is in float32,
one kernel multiplies and adds (bench/notes/gpu.md, "Sums of gradients"). XLA for TPUs has one for
both.

Only sums of a whole ref count. To a part of one, as in the body of a scan over layers, XLA for GPUs
adds in a kernel of its own anyhow, and a product in float32 has more bytes to write and to read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from pipeline.base.tree import Tree
from pipeline.core.autodiff.jaxpr.evaluate import operands, producers
from pipeline.core.autodiff.jaxpr.primitives import bodies, traits

Mask = Sequence[bool]

# By the name of a primitive, the parameter that holds the jaxprs it runs.
_BODIES = {
    "closed_call": "call_jaxpr",
    "cond": "branches",
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "scan": "jaxpr",
    "while": "body_jaxpr",
}
_MOVES = frozenset(("layout_constraint", "name", "reshape", "squeeze", "transpose"))


def with_wide_products(f: Callable[..., tuple[Tree, Tree]], *args: Any) -> tuple[Tree, Tree]:
    """Call a function, with products in float32 where they are summed in float32.

    Args:
      f: from arrays and refs to two trees of arrays; those of the first are summed, and so are
        the values that it adds to refs.
      args: its arguments.
    """
    closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
    count = len(jax.tree.leaves(like[0]))
    summed = [n < count for n in range(len(closed.jaxpr.outvars))]
    wide = _closed(closed, functools.partial(widened, summed=summed))
    results = jaxpr_as_fun(wide)(*jax.tree.leaves(args))
    trees: tuple[Tree, Tree] = jax.tree.unflatten(jax.tree.structure(like), results)
    return trees


def widened(jaxpr: Any, summed: Mask, parts: Mask = ()) -> Any:
    """Rewrite a jaxpr to compute products in float32 if they are widened to float32 and summed.

    Bodies are looked into. Without any such product it is the one that was given.

    Args:
      jaxpr: of a backward pass.
      summed: which of its results are added to sums; no further ones are.
      parts: which of its inputs are refs of parts of others; no further ones are.
    """
    made_by = producers(jaxpr)
    uses = Counter(v for eqn in jaxpr.eqns for v in operands(eqn))
    uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    of_parts = {v for v, is_part in zip(jaxpr.invars, parts, strict=False) if is_part}
    wanted = {v for v, s in zip(jaxpr.outvars, summed, strict=False) if s and isinstance(v, Var)}
    added = (e.invars[1] for e in jaxpr.eqns if _adds_to_whole(e, of_parts))
    wanted |= {v for v in added if isinstance(v, Var)}
    # By id: the equations that are replaced; None for a cast that is dropped.
    changed: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        if (name := _BODIES.get(eqn.primitive.name)) is not None:
            inside = _within(eqn, eqn.params[name], wanted, of_parts)
            if inside is not eqn.params[name]:
                changed[id(eqn)] = eqn.replace(params=eqn.params | {name: inside})
        elif eqn.outvars and eqn.outvars[0] in wanted and _widens(eqn):
            path = _to_product(eqn, made_by, uses)
            changed |= zip(map(id, path), _in_float32(path, eqn.outvars[0]), strict=True)
            changed |= {id(eqn): None} if path else {}
    if not changed:
        return jaxpr
    eqns = [changed.get(id(eqn), eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _adds_to_whole(eqn: Any, parts: set[Any]) -> bool:
    """Tell whether an equation adds to all of a ref that is no part of another."""
    return eqn.primitive.name == "addupdate" and len(eqn.invars) == 2 and eqn.invars[0] not in parts


def _widens(eqn: Any) -> bool:
    """Tell whether an equation casts floats of 16 bits to float32, and does nothing else."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    source, result = eqn.invars[0].aval, eqn.outvars[0].aval
    is_half = jnp.issubdtype(source.dtype, jnp.floating) and source.dtype.itemsize == 2
    return is_half and result.dtype == jnp.float32 and result == source.update(dtype=result.dtype)


def _to_product(cast: Any, made_by: dict[Any, Any], uses: Counter[Any]) -> list[Any]:
    """The product that a cast widens and the equations between, in order; empty without one.

    Nothing else reads any of their results.
    """
    path: list[Any] = []
    var = cast.invars[0]
    while uses[var] == 1 and var in made_by:
        eqn = made_by[var]
        path.append(eqn)
        if eqn.primitive.name == "dot_general":
            is_plain = isinstance(eqn.params["precision"], (tuple, jax.lax.Precision, type(None)))
            return path[::-1] if is_plain else []  # an algorithm says itself how it rounds
        if eqn.primitive.name not in _MOVES or len(operands(eqn)) != 1:
            break
        var = operands(eqn)[0]
    return []


def _in_float32(path: Sequence[Any], out: Any) -> list[Any]:
    """A product and the equations that move its numbers, in float32; ``out`` is the last result."""
    steps: list[Any] = []
    wide = jnp.dtype(jnp.float32)
    for step in path:
        of_step = {} if steps else {"preferred_element_type": wide}
        reads = steps[-1].outvars if steps else step.invars
        result = out if step is path[-1] else Var(step.outvars[0].aval.update(dtype=wide))
        params = step.params | of_step
        steps.append(step.replace(invars=list(reads), outvars=[result], params=params))
    return steps


def _within(eqn: Any, parameter: Any, wanted: set[Any], parts: set[Any]) -> Any:
    """The bodies of an equation with products widened, as its parameter holds them."""
    results = []
    all_closed = parameter if isinstance(parameter, tuple) else (parameter,)
    loops = traits(eqn).loops
    summed = [not loops and v in wanted for v in eqn.outvars]
    for closed, body in zip(all_closed, bodies(eqn), strict=True):
        inputs = eqn.invars[body.first :]
        of_parts = [isinstance(v, Var) and v in parts for v in inputs]
        if eqn.primitive.name == "scan":  # a ref among its rows is a part in every trip
            of_parts[body.carry.stop :] = [True] * len(inputs[body.carry.stop :])
        results.append(_closed(closed, functools.partial(widened, summed=summed, parts=of_parts)))
    if all(a is b for a, b in zip(results, all_closed, strict=True)):
        return parameter
    return tuple(results) if isinstance(parameter, tuple) else results[0]


def _closed(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Close a jaxpr over its constants, if any, after a change of its equations."""
    if not isinstance(jaxpr, ClosedJaxpr) or isinstance(jaxpr, Jaxpr):
        return change(jaxpr)
    changed = change(jaxpr.jaxpr)
    return jaxpr if changed is jaxpr.jaxpr else jaxpr.replace(jaxpr=changed)
