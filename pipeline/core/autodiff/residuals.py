"""The residuals that a forward pass keeps for its backward, and the recomputed values.

`jax.vjp` closes over residuals. This module separates them, so that few of them are stashed:

* An argument (a weight, a mask, the carries of earlier slices) is passed to the backward again.
* A value computed only from weights (a cast, a transpose) is recomputed: a stash would hold a copy
  of the weights for every microbatch in flight.
* For the other residuals, the smallest set of values is stashed from which all follow by cheap
  arithmetic (`pipeline.core.autodiff.min_cut`). If wanted, all-gathers are repeated too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

from pipeline.base.masks import NeedsGradient
from pipeline.base.precision import GradDtype
from pipeline.base.tree import Leaves, Tree, combine, partition
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.jaxpr.evaluate import Var, evaluate, operands, producers
from pipeline.core.autodiff.jaxpr.primitives import is_cheap, traits
from pipeline.core.autodiff.min_cut import smallest_cut
from pipeline.core.autodiff.outcome import MakeAdding, Outcome, SlicedInput, outcome_and_pullback

StageFunction = Callable[[Leaves, Tree, Tree, Tree], Outcome]  # (weights, fixed, side, x)


def stage_pullback(
    f: StageFunction,
    weights: Leaves,
    fixed: Tree,
    side: Tree,
    x: Tree,
    *,
    grad_dtype: GradDtype = None,
    need: NeedsGradient | None = None,
    adding: MakeAdding | None = None,
    late: bool = False,
    part: str = "",
) -> tuple[Outcome, Pullback]:
    """Call a stage; return its outcome, and its pullback for weights and x's float leaves.

    ``need`` selects the gradients. `outcome_and_pullback` explains ``adding``; `differentiate`
    explains ``late`` and ``part``.
    """
    floats, others = partition(x)
    mask, want_x = (need.weights, need.x) if need else (None, True)

    def g(w: Leaves, xf: Leaves) -> Outcome:
        return f(w, fixed, side, combine(x, xf if want_x else floats, others))

    options: dict[str, Any] = {"grad_dtype": grad_dtype, "late": late, "part": part}
    inputs = floats if want_x else []
    return outcome_and_pullback(g, weights, inputs, trained=mask, adding=adding, **options)


class Residuals:
    """The pullback of a stage as two functions of arrays, `forward` and `backward`.

    Args:
      f: the stage. ``fixed`` is equal for every microbatch (a stage's state other than weights);
        ``side`` is not (extras, dropout keys).
      weights, fixed, side, x: examples, for their types.
      need: the gradients that the backward computes; None for all gradients.
      gathers: whether the backward may repeat the forward's all-gathers.
      holds_output: whether the stash also has the stage's output, which `output` reads.

    Attributes:
      stashed: the types of the stash for one microbatch.
      gathers: whether the backward repeats any all-gather.
    """

    def __init__(
        self,
        f: StageFunction,
        weights: Leaves,
        fixed: Tree,
        side: Tree,
        x: Tree,
        *,
        grad_dtype: GradDtype = None,
        need: NeedsGradient | None = None,
        adding: MakeAdding | None = None,
        gathers: bool = False,
        part: str = "",
        holds_output: bool = False,
    ) -> None:
        self._part, self.holds_output = part, holds_output

        def linearized(*arguments: Any) -> Any:
            options: Any = {"grad_dtype": grad_dtype, "need": need, "adding": adding}
            outcome, pullback = stage_pullback(f, *arguments, **options, part=part)
            residuals, self._treedef = jax.tree.flatten(pullback.vjp)
            self._by_value = pullback.by_value
            return outcome, residuals

        closed, (outcome, _) = jax.make_jaxpr(linearized, return_shape=True)(
            weights, fixed, side, x
        )
        self._jaxpr = jaxpr = closed.jaxpr
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._outcome_tree = jax.tree.structure(outcome)
        self._output_tree = jax.tree.structure(outcome.value)
        output = jax.tree.leaves(outcome.value) if holds_output else []
        count = len(jax.tree.leaves(outcome))
        self._outcome, self._residuals = jaxpr.outvars[:count], jaxpr.outvars[count:]
        same = jaxpr.invars[: len(jax.tree.leaves((weights, fixed)))]
        count = len(jax.tree.leaves((weights, fixed, side)))
        carried = len(jax.tree.leaves(x.earlier)) if isinstance(x, SlicedInput) else 0
        behind = jaxpr.invars[len(jaxpr.invars) - carried :]
        self._again = [*jaxpr.invars[:count], *behind]
        free = _determined(jaxpr, {*same, *self._constants}) | set(self._again)
        wanted = [v for v in self._residuals if not isinstance(v, Literal) and v not in free]
        made_by = producers(jaxpr)

        def before(var: Var) -> list[Var] | None:
            eqn = made_by.get(var)
            if eqn is None or not (is_cheap(eqn) or (gathers and _gathers(eqn))):
                return None
            return [v for v in operands(eqn) if v not in free]

        self._cut = smallest_cut(wanted, before)
        self.stashed = [*(v.aval for v in self._cut), *output]
        again = _between(self._cut, wanted, before) if gathers else ()
        self.gathers = any(_gathers(made_by[v]) for v in again)

    def forward(self, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> tuple[Outcome, Leaves]:
        """Call the stage; return its outcome, and the values to stash."""
        arguments = jax.tree.leaves((weights, fixed, side, x))
        values = self._constants | dict(zip(self._jaxpr.invars, arguments, strict=True))
        results = evaluate(self._jaxpr, values, [*self._outcome, *self._cut], effects=True)
        count = len(self._outcome)
        outcome = jax.tree.unflatten(self._outcome_tree, results[:count])
        output = jax.tree.leaves(outcome.value) if self.holds_output else []
        return outcome, [*results[count:], *output]

    def output(self, stash: Leaves) -> Tree:
        """Return the stage's output from a stash that holds it."""
        return jax.tree.unflatten(self._output_tree, stash[len(self._cut) :])

    def backward(
        self, weights: Leaves, fixed: Tree, side: Tree, stash: Leaves, earlier: Tree = ()
    ) -> Pullback:
        """Make the stage's pullback; ``earlier`` is `SlicedInput.earlier` for a slice, else ()."""
        arguments = jax.tree.leaves((weights, fixed, side, earlier))
        values = self._constants | dict(zip(self._again, arguments, strict=True))
        values |= dict(zip(self._cut, stash[: len(self._cut)], strict=True))
        residuals = evaluate(self._jaxpr, values, self._residuals)
        return Pullback(jax.tree.unflatten(self._treedef, residuals), self._by_value, self._part)


def _between(
    cut: list[Var], wanted: list[Var], before: Callable[[Var], list[Var] | None]
) -> set[Var]:
    """Find the values to recompute: wanted values that are not kept, and their inputs."""
    between: set[Var] = set()
    left = list(wanted)
    while left:
        var = left.pop()
        if var not in between and var not in cut:
            between.add(var)
            left += before(var) or []
    return between


def _gathers(eqn: Any) -> bool:
    return traits(eqn).hlo == "all-gather"


def _determined(jaxpr: Any, sources: set[Var]) -> set[Var]:
    """Find all variables that can be computed from ``sources`` alone.

    Bodies are not searched: a value that a scan over layers computes from weights alone counts as
    depending on all operands of the scan, and may be stashed.
    """
    variables = set(sources)
    for eqn in jaxpr.eqns:
        if all(v in variables for v in operands(eqn)):
            variables.update(eqn.outvars)
    return variables
