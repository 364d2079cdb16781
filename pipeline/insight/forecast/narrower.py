"""Values that the TPU compiler keeps in a narrower dtype than the program's, found in its jaxpr.

A TPU multiplies in bfloat16: it rounds the float32 operands of a product at default precision. The
compiler rounds as early as it can. An array that only products read is kept in bfloat16 from the
start, such as a stash that only gradients of weights need.

Weights that a loop does not change are rounded once, outside all loops around their products. A
part of stacked weights is rounded outside the loop over layers. This also holds for weights that a
stage itself casts in every action. The copy exists as long as microbatches run.

All of this was read from optimised HLO (v5e, libtpu 0.0.52). On CPU a cast stays in its loop, and
products are in their operands' dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from pipeline.core.autodiff.jaxpr.evaluate import follow
from pipeline.core.autodiff.jaxpr.primitives import bodies, equations, is_ref, traits

_ROUNDED = jnp.dtype(jnp.bfloat16)
_PRODUCTS = "dot_general", "conv_general_dilated", "ragged_dot_general"

Root = Any  # the array outside the loops that a variable is a part of; None for all others


@dataclass
class Readers:
    """The equations that read an array, or parts of an array.

    Attributes:
      casts: the narrower dtypes that the array is cast to.
      products: whether products read the array and round it to bfloat16.
      others: whether any equation reads the array unrounded.
    """

    casts: set[Any] = field(default_factory=set)
    products: bool = False
    others: bool = False


def cast_once(jaxpr: Any) -> int:
    """Count the bytes of loop-invariant arrays that are rounded within a body's loops.

    An array that is also read unrounded, such as a batch that is both multiplied and added, is
    rounded where it is multiplied, unless the program casts it.

    Args:
      jaxpr: the body that each device runs.
    """
    search = _NarrowSearch()
    for eqn in equations(jaxpr):
        if traits(eqn).loops:
            search.enter(eqn, [None if isinstance(v, Literal) else v for v in eqn.invars])
    found = 0
    for var, readers in search.readers.items():
        if not is_ref(var.aval):
            dtypes = set(readers.casts)
            if readers.products and not readers.others:
                dtypes.add(_ROUNDED)
            found += sum(var.aval.size * dtype.itemsize for dtype in dtypes)
    return found


def rounded(jaxpr: Any) -> set[Any]:
    """Find the refs made in a body that are read only by products that round them to bfloat16.

    Args:
      jaxpr: the body that each device runs.
    """
    search = _NarrowSearch()
    search.walk(jaxpr, [None] * len(jaxpr.invars))
    return {
        var
        for var, read in search.readers.items()
        if is_ref(var.aval) and read.products and not (read.others or read.casts)
    }


class _NarrowSearch:
    """A walk through a body and its inner bodies that follows arrays (*roots*) and their parts."""

    def __init__(self) -> None:
        self.readers: dict[Any, Readers] = defaultdict(Readers)

    def walk(self, jaxpr: Any, roots: Sequence[Root]) -> list[Root]:
        """Record the readers of the root arrays in a body; return the root of each result."""
        nothing = [None] * len(jaxpr.constvars)
        return follow(jaxpr, roots, nothing, lambda _: None, self._equation)

    def enter(self, eqn: Any, roots: Sequence[Root]) -> list[Root]:
        """Search the bodies of an equation; values that a loop changes are not tracked."""
        results: list[Root] = [None] * len(eqn.outvars)
        for body in bodies(eqn):
            given = list(roots[body.first :])
            for index in body.carry:
                self._note(eqn, given[index])
                given[index] = None
            made = self.walk(body.jaxpr, given)
            if traits(eqn).calls:
                results = made
            else:
                for root in made:
                    self._note(eqn, root)
        return results

    def _equation(self, eqn: Any, roots: list[Root]) -> list[Root]:
        """Record an equation's use of root arrays; return the results that are parts of a root."""
        if bodies(eqn):
            return self.enter(eqn, roots)
        first, *others = roots or [None]
        results, name = eqn.outvars, eqn.primitive.name
        for root in others:
            if root is not first or name != "swap":  # writing a ref's contents back is not a read
                self._note(eqn, root)
        if name == "new_ref":
            self._note(eqn, first)
            return list(results)
        if first is not None and _keeps(eqn, first):
            dtype = results[0].aval.dtype  # a swap returns the old contents
            if dtype.itemsize >= first.aval.dtype.itemsize:
                return [first] * len(results)
            self.readers[first].casts.add(dtype)
        else:
            self._note(eqn, first)
        return [None] * len(results)

    def _note(self, eqn: Any, root: Root) -> None:
        """Record whether an equation that reads a root array rounds it to bfloat16."""
        if root is None:
            return
        if root.aval.dtype == jnp.float32 and _rounds(eqn):
            self.readers[root].products = True
        else:
            self.readers[root].others = True


def _keeps(eqn: Any, root: Root) -> bool:
    """Tell whether an equation's result is a root array, or a part of it."""
    what, name = traits(eqn), eqn.primitive.name
    if name == "dynamic_update_slice":  # the updated contents of a ref, to be written back
        return is_ref(root.aval)
    return what.moves or what.part or name in ("get", "swap")


def _rounds(eqn: Any) -> bool:
    """Tell whether an equation is a product at default precision."""
    if eqn.primitive.name not in _PRODUCTS:
        return False
    asked = eqn.params["precision"]
    return asked is None or asked == (jax.lax.Precision.DEFAULT,) * 2
