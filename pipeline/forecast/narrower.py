"""What the TPU compiler keeps in a narrower dtype than the program says, found in its jaxpr.

A TPU multiplies in bfloat16, and float32 operands of a product at default precision are rounded to
it. The compiler rounds as early as it can: what products alone read is kept in bfloat16 to begin
with, as a stash of what only the gradients of weights need. And weights that a loop does not change
are rounded once, outside all loops around their products, also a part of stacked weights outside
the loop over layers: the copy is there as long as microbatches run. So it is with weights that a
stage itself casts in every action. All of this stands in the optimised HLO (v5e, libtpu 0.0.52); on
CPU a cast stays in its loop, and products are in their operands' dtype.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from pipeline.jaxpr.primitives import bodies, equations, is_ref, traits

_ROUNDED = jnp.dtype(jnp.bfloat16)
_PRODUCTS = "dot_general", "conv_general_dilated", "ragged_dot_general"

Roots = dict[Any, Any]  # a variable to what is whole of it, outside the loops


@dataclass
class Readers:
    """What reads an array, or parts of it.

    Attributes:
      casts: the narrower dtypes that it is cast to.
      products: whether products read it which round it to bfloat16.
      others: whether anything reads it as it is.
    """

    casts: set[Any] = field(default_factory=set)
    products: bool = False
    others: bool = False


def cast_once(jaxpr: Any) -> int:
    """Bytes of what does not change in the loops of a body and is rounded there.

    What is also read as it is, as a batch that is both multiplied and added to, is rounded where it
    is multiplied, unless the program casts it.

    Args:
      jaxpr: what each device runs.
    """
    search = _Search()
    for eqn in equations(jaxpr):
        if traits(eqn).loops:
            outside = [v for v in eqn.invars if not isinstance(v, Literal) and not is_ref(v.aval)]
            search.enter(eqn, {v: v for v in outside})
    found = 0
    for var, readers in search.readers.items():
        dtypes = set(readers.casts)
        if readers.products and not readers.others:
            dtypes.add(_ROUNDED)
        found += sum(var.aval.size * dtype.itemsize for dtype in dtypes)
    return found


def rounded(jaxpr: Any) -> set[Any]:
    """The refs made in a body that products alone read, all of which round them to bfloat16.

    Args:
      jaxpr: what each device runs.
    """
    search = _Search()
    search.follow(jaxpr, {}, makes_refs=True)
    read = search.readers
    return {r for r in search.refs if read[r].products and not (read[r].others or read[r].casts)}


class _Search:
    """A walk through a body and all bodies in it, after arrays and what parts of them become."""

    def __init__(self) -> None:
        self.readers: dict[Any, Readers] = defaultdict(Readers)
        self.refs: list[Any] = []

    def follow(self, jaxpr: Any, roots: Roots, *, makes_refs: bool = False) -> Roots:
        """Note who reads the roots in a body; returns what else in it is a part of one."""
        roots = dict(roots)
        for eqn in jaxpr.eqns:
            if makes_refs and eqn.primitive.name == "new_ref":
                (ref,) = eqn.outvars
                self.refs.append(ref)
                roots[ref] = ref
            elif bodies(eqn):
                roots.update(self.enter(eqn, roots, makes_refs=makes_refs))
            else:
                roots.update(self._equation(eqn, roots))
        return roots

    def enter(self, eqn: Any, roots: Roots, *, makes_refs: bool = False) -> Roots:
        """Look into the bodies of an equation; returns which of its results are parts of roots.

        What a loop changes is not followed.
        """
        passed: Roots = {}
        for body in bodies(eqn):
            inputs = body.jaxpr.invars
            given = dict(zip(inputs, eqn.invars[body.first :], strict=True))
            inner: Roots = {}
            for index, var in enumerate(inputs):
                if _is_in(given[var], roots):
                    if index in body.carry:
                        self.readers[roots[given[var]]].others = True
                    else:
                        inner[var] = roots[given[var]]
            inside = self.follow(body.jaxpr, inner, makes_refs=makes_refs)
            for var, out in zip(body.jaxpr.outvars, eqn.outvars, strict=True):
                if _is_in(var, inside):
                    if traits(eqn).calls:
                        passed[out] = inside[var]
                    else:
                        self.readers[inside[var]].others = True
        return passed

    def _equation(self, eqn: Any, roots: Roots) -> Roots:
        """Note what an equation does with the roots; returns which results are parts of one."""
        first, *others = ((roots[v] if _is_in(v, roots) else None) for v in eqn.invars or [None])
        for root in others:
            if root is not None:
                self._note(eqn, root)
        if first is None:
            return {}
        what, name = traits(eqn), eqn.primitive.name
        dtype = eqn.outvars[0].aval.dtype if eqn.outvars else first.aval.dtype
        if name == "convert_element_type" and dtype.itemsize < first.aval.dtype.itemsize:
            self.readers[first].casts.add(dtype)
        elif what.moves or what.part or name in ("get", "swap"):  # which returns what was there
            return dict.fromkeys(eqn.outvars, first)
        else:
            self._note(eqn, first)
        return {}

    def _note(self, eqn: Any, root: Any) -> None:
        """Note an equation that computes with a root."""
        if root.aval.dtype == jnp.float32 and _rounds(eqn):
            self.readers[root].products = True
        else:
            self.readers[root].others = True


def _rounds(eqn: Any) -> bool:
    """Whether it is a product at default precision."""
    if eqn.primitive.name not in _PRODUCTS:
        return False
    asked = eqn.params["precision"]
    return asked is None or asked == (jax.lax.Precision.DEFAULT,) * 2


def _is_in(atom: Any, roots: Roots) -> bool:
    return not isinstance(atom, Literal) and atom in roots
