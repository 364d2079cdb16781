"""What a forward pass leaves for its backward, and what it need not leave.

`jax.vjp` closes over residuals. Here they are taken apart, so that only those which differ by
microbatch are stashed:

* an argument (a weight, a mask) is passed to the backward again;
* what follows from weights alone (a cast, a transpose) is computed again: stashing it would
  hold a copy of the weights for every microbatch in flight;
* the rest is stashed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from pipeline.accumulate import Pullback, differentiate
from pipeline.tree import Leaves, Tree, combine, partition

StageFunction = Callable[[Leaves, Tree, Tree, Tree], Tree]  # (weights, fixed, side, x) -> y


def stage_pullback(
    f: StageFunction, weights: Leaves, fixed: Tree, side: Tree, x: Tree
) -> tuple[Tree, Pullback]:
    """A stage's output, and its pullback over (weights, x's float leaves)."""
    floats, others = partition(x)

    def g(w: Leaves, xf: Leaves) -> tuple[Leaves, Leaves]:
        return partition(f(w, fixed, side, combine(x, xf, others)))

    y, y_others, pullback = differentiate(g, weights, floats)
    return combine(x, y, y_others), pullback


class Residuals:
    """The vjp of a stage as two functions of arrays, `forward` and `backward`.

    Args:
      f: the stage; ``fixed`` is the same for every microbatch (a stage's state beside its
        weights), ``side`` is not (extras, dropout keys).
      weights, fixed, side, x: examples, for their types.

    Attributes:
      stashed: the types of what must be stashed for one microbatch.
    """

    def __init__(self, f: StageFunction, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> None:
        treedef: Any = None
        by_value: tuple[bool, ...] = ()

        def linearized(*arguments: Any) -> Any:
            nonlocal treedef, by_value
            y, pullback = stage_pullback(f, *arguments)
            residuals, treedef = jax.tree.flatten(pullback.vjp)
            by_value = pullback.by_value
            return y, residuals

        closed, (y, _) = jax.make_jaxpr(linearized, return_shape=True)(weights, fixed, side, x)
        self._treedef, self._by_value = treedef, by_value
        self._y_tree = jax.tree.structure(y)
        self._jaxpr: ClosedJaxpr = closed
        self._num_y = self._y_tree.num_leaves
        num_fixed = len(jax.tree.leaves((weights, fixed)))
        num_again = len(jax.tree.leaves((weights, fixed, side)))
        invars = closed.jaxpr.invars
        again = {id(v): i for i, v in enumerate(invars[:num_again])}
        varying = _reached(closed.jaxpr, {id(v) for v in invars[num_fixed:]})
        # Where the backward finds each residual: ("argument", i), ("fixed", i) or ("stash", i).
        self._source: list[tuple[str, int]] = []
        self._fixed_out: list[int] = []
        stash_out: dict[int, int] = {}
        for out, var in enumerate(closed.jaxpr.outvars[self._num_y :], start=self._num_y):
            if id(var) in again:
                self._source.append(("argument", again[id(var)]))
            elif isinstance(var, Literal) or id(var) not in varying:
                self._source.append(("fixed", len(self._fixed_out)))
                self._fixed_out.append(out)
            else:
                slot = next((i for i, o in stash_out.items() if closed.jaxpr.outvars[o] is var), None)
                if slot is None:
                    slot = len(stash_out)
                    stash_out[slot] = out
                self._source.append(("stash", slot))
        self._stash_out = list(stash_out.values())
        self.stashed = [closed.out_avals[o] for o in self._stash_out]

    def forward(self, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> tuple[Tree, Leaves]:
        """The stage's output, and what to stash."""
        outs = jaxpr_as_fun(self._jaxpr)(*jax.tree.leaves((weights, fixed, side, x)))
        y = jax.tree.unflatten(self._y_tree, outs[: self._num_y])
        return y, [outs[o] for o in self._stash_out]

    def backward(self, weights: Leaves, fixed: Tree, side: Tree, stash: Leaves) -> Pullback:
        """The stage's pullback."""
        arguments = jax.tree.leaves((weights, fixed, side))
        again: Leaves = []
        if self._fixed_out:
            wanted = [o in self._fixed_out for o in range(len(self._jaxpr.jaxpr.outvars))]
            jaxpr, used = dce_jaxpr(self._jaxpr.jaxpr, wanted)
            inputs = [a for a, u in zip(arguments, used[: len(arguments)], strict=True) if u]
            again = jaxpr_as_fun(ClosedJaxpr(jaxpr, self._jaxpr.consts))(*inputs)
        found = {"argument": arguments, "fixed": again, "stash": stash}
        vjp = jax.tree.unflatten(self._treedef, [found[kind][i] for kind, i in self._source])
        return Pullback(vjp, self._by_value)


def _reached(jaxpr: Any, sources: set[int]) -> set[int]:
    """Ids of the variables that depend on any source; an equation's outputs do if an input does.

    A nested `jit` is looked into, other bodies (a scan over layers) are not: what such a body
    derives from weights alone is then stashed, which is correct and costs memory.
    """
    reached = set(sources)
    for eqn in jaxpr.eqns:
        touched = [id(v) in reached for v in eqn.invars]
        if not any(touched):
            continue
        body = eqn.params.get("jaxpr") if eqn.primitive.name in ("pjit", "jit") else None
        if body is None:
            reached.update(id(v) for v in eqn.outvars)
            continue
        inner = body.jaxpr
        inside = _reached(inner, {id(v) for v, t in zip(inner.invars, touched, strict=True) if t})
        reached.update(
            id(v) for v, w in zip(eqn.outvars, inner.outvars, strict=True) if id(w) in inside
        )
    return reached
