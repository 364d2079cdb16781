"""Products that are computed in float32, not rounded to 16 bits, if they are summed in float32.

A float32 weight that a stage reads in bfloat16 gets a gradient in bfloat16: the product is rounded,
widened again, and then added to its float32 sum. XLA for GPUs compiles this to two kernels: the
second reads the product and the sum and writes the sum. If the product is in float32, one kernel
multiplies and adds (bench/notes/gpu.md, "Sums of gradients"). XLA for TPUs uses one kernel in both
cases.

Only additions to a whole ref are changed. XLA for GPUs always adds to a part of a ref in a separate
kernel, as in the body of a scan over layers. There a product in float32 has more bytes to write and
to read.
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

# For each primitive with bodies, the parameter that holds their jaxprs.
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
    """Call a function so that products that are summed in float32 are computed in float32.

    Args:
      f: a function of arrays and refs that returns two trees of arrays. The caller sums the arrays
        of the first tree; the function itself adds values to refs.
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

    Bodies are rewritten too. Without any such product, ``jaxpr`` itself is returned.

    Args:
      summed: the mask of results that are added to sums; missing entries count as False.
      parts: the mask of inputs that are parts of other refs; missing entries count as False.
    """
    made_by = producers(jaxpr)
    uses = Counter(v for eqn in jaxpr.eqns for v in operands(eqn))
    uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    of_parts = {v for v, is_part in zip(jaxpr.invars, parts, strict=False) if is_part}
    wanted = {v for v, s in zip(jaxpr.outvars, summed, strict=False) if s and isinstance(v, Var)}
    added = (e.invars[1] for e in jaxpr.eqns if _adds_to_whole(e, of_parts))
    wanted |= {v for v in added if isinstance(v, Var)}
    # By the id of an equation, its replacement; None for a cast that is dropped.
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
    """Tell whether an equation adds to a whole ref, not to a part of another ref."""
    return eqn.primitive.name == "addupdate" and len(eqn.invars) == 2 and eqn.invars[0] not in parts


def _widens(eqn: Any) -> bool:
    """Tell whether an equation only casts 16-bit floats to float32."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    source, result = eqn.invars[0].aval, eqn.outvars[0].aval
    is_half = jnp.issubdtype(source.dtype, jnp.floating) and source.dtype.itemsize == 2
    return is_half and result.dtype == jnp.float32 and result == source.update(dtype=result.dtype)


def _to_product(cast: Any, made_by: dict[Any, Any], uses: Counter[Any]) -> list[Any]:
    """List the product that a cast widens and the equations between, in order; else [].

    The list is also empty if another equation reads any of their results.
    """
    path: list[Any] = []
    var = cast.invars[0]
    while uses[var] == 1 and var in made_by:
        eqn = made_by[var]
        path.append(eqn)
        if eqn.primitive.name == "dot_general":
            is_plain = isinstance(eqn.params["precision"], (tuple, jax.lax.Precision, type(None)))
            return path[::-1] if is_plain else []  # a chosen algorithm fixes the rounding
        if eqn.primitive.name not in _MOVES or len(operands(eqn)) != 1:
            break
        var = operands(eqn)[0]
    return []


def _in_float32(path: Sequence[Any], out: Any) -> list[Any]:
    """Rewrite a product, and equations that move its values up to ``out``, to float32."""
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
    """Rewrite the bodies in an equation's parameter with wide products; keep its structure."""
    results = []
    all_closed = parameter if isinstance(parameter, tuple) else (parameter,)
    loops = traits(eqn).loops
    summed = [not loops and v in wanted for v in eqn.outvars]
    for closed, body in zip(all_closed, bodies(eqn), strict=True):
        inputs = eqn.invars[body.first :]
        of_parts = [isinstance(v, Var) and v in parts for v in inputs]
        if eqn.primitive.name == "scan":  # each trip gets a part of a scanned ref
            of_parts[body.carry.stop :] = [True] * len(inputs[body.carry.stop :])
        results.append(_closed(closed, functools.partial(widened, summed=summed, parts=of_parts)))
    if all(a is b for a, b in zip(results, all_closed, strict=True)):
        return parameter
    return tuple(results) if isinstance(parameter, tuple) else results[0]


def _closed(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to a jaxpr; keep the constants of a closed jaxpr."""
    if not isinstance(jaxpr, ClosedJaxpr) or isinstance(jaxpr, Jaxpr):
        return change(jaxpr)
    changed = change(jaxpr.jaxpr)
    return jaxpr if changed is jaxpr.jaxpr else jaxpr.replace(jaxpr=changed)
