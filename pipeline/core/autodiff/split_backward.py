"""W separated from I: a stage's backward as two functions, `input_half` and `weight_half`.

Together they compute the stage's pullback, with each product once. The first computes the gradient
for the stage's input and a few crossing values. The second computes the weights' gradients from the
crossing values, at the time that the schedule chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from collectives import vary, varying_axes
from pipeline.base.masks import NeedsGradient, chosen
from pipeline.base.precision import GradDtype
from pipeline.base.tree import Leaves, Tree
from pipeline.core.autodiff.accumulate import Pullback, as_summed
from pipeline.core.autodiff.halves import NameFacts
from pipeline.core.autodiff.jaxpr.dead_code import lean
from pipeline.core.autodiff.jaxpr.reachability import touched
from pipeline.core.autodiff.jaxpr.reader import read_block
from pipeline.core.autodiff.jaxpr.steps import JaxprStep, Name, prune, read, run
from pipeline.core.autodiff.outcome import MakeAdding, Outcome
from pipeline.core.autodiff.split import halve

# (weights, fixed, side, stash) -> (the stage's outcome or None, its pullback)
Linearize = Callable[[Leaves, Tree, Tree, Tree], tuple[Outcome | None, Pullback]]


class _Inputs(NamedTuple):
    """The names of a backward pass's inputs, in the order of its block."""

    weights: list[Name]
    fixed: list[Name]
    side: list[Name]
    stash: list[Name]
    dy: list[Name]
    refs: list[Name]


class SplitBackward:
    """A backward pass in two halves.

    Args:
      linearize: a function from a stage's arguments and stash to its outcome, or None, and its
        pullback.
      weights, fixed, side, stash: examples of its arguments, which
        `pipeline.core.autodiff.residuals` explains. Both halves get all but ``stash``.
      dy: an example of the gradients for the float leaves of the stage's output.
      need: the gradients that the pullback computes; None for all gradients.

    Attributes:
      crossing: the types of the values from `input_half` to `weight_half`, for one microbatch.
      whole: descriptions of operations that could not be split, and so are in `input_half`.
    """

    def __init__(
        self,
        linearize: Linearize,
        weights: Leaves,
        fixed: Tree,
        side: Tree,
        stash: Tree,
        dy: Leaves,
        *,
        grad_dtype: GradDtype = None,
        need: NeedsGradient | None = None,
        adding: MakeAdding | None = None,
    ) -> None:
        mask, want_x = (need.weights, need.x) if need else (None, True)
        count = len(chosen(weights, mask)) + (adding is not None)  # the number of refs

        def joint(weights: Leaves, fixed: Tree, side: Tree, stash: Tree, dy: Leaves) -> Any:
            mine = [*chosen(weights, mask), *([adding().probe] if adding else [])]
            refs = list(map(_new_ref, as_summed(mine, grad_dtype)))
            outcome, pullback = linearize(weights, fixed, side, stash)
            y = None if outcome is None else outcome.value
            return y, pullback(dy, refs, want_x=want_x)

        arguments = weights, fixed, side, stash, dy
        closed, (y, _) = jax.make_jaxpr(joint, return_shape=True)(*arguments)
        block = read_block(closed, count)
        refs_in = frozenset(block.inputs[-count:] if count else ())
        block = lean(block, [True] * len(block.outs), refs_in)
        self._y_tree, self._constants = jax.tree.structure(y), block.constants
        num_y = len(jax.tree.leaves(y))
        self._y, self._dx = block.outs[:num_y], block.outs[num_y:]
        inputs, sizes = iter(block.inputs), [len(jax.tree.leaves(a)) for a in arguments]
        self._inputs = _Inputs(*(list(itertools.islice(inputs, n)) for n in (*sizes, None)))
        outs = len(block.outs)
        same = frozenset((*self._inputs.weights, *self._inputs.fixed))
        facts = NameFacts(refs=refs_in, same=same, again=frozenset(self._inputs.side))
        # The first half has all results; the second only adds to refs.
        halves = halve(block, [True] * outs, [False] * outs, facts)
        self._first, self._second, self._crossing = halves.first, halves.second, halves.crossing
        self.crossing, self.whole = [n.aval for n in halves.crossing], halves.whole

    def input_half(
        self,
        weights: Leaves,
        fixed: Tree,
        side: Tree,
        stash: Tree,
        dy: Leaves | Callable[[Tree], Leaves],
        refs: Leaves,
        *,
        want_x: bool = True,
    ) -> tuple[Leaves, Leaves]:
        """Compute the gradients for the stage's input, and the crossing values.

        Args:
          dy: the gradients for the output, or a function from the output to these gradients.
          refs: refs of the weights' gradients; here only unsplit operations add to them.
        """
        values = self._values(weights=weights, fixed=fixed, side=side, stash=stash, refs=refs)
        done: set[int] = set()
        if callable(dy):
            forward = prune(self._first, self._y, values)
            done, values = set(map(id, forward)), run(forward, values)
            dy = dy(jax.tree.unflatten(self._y_tree, [read(values, a) for a in self._y]))
        values |= dict(zip(self._inputs.dy, dy, strict=True))
        wanted = self._dx if want_x else []

        def remains(step: JaxprStep) -> bool:
            return id(step) not in done and (step.effect or bool(touched(step)))

        env = run(prune(self._first, [*wanted, *self._crossing], values, remains), values)
        return [read(env, a) for a in wanted], [env[n] for n in self._crossing]

    def weight_half(
        self, weights: Leaves, fixed: Tree, side: Tree, crossing: Leaves, refs: Leaves
    ) -> None:
        """Add the weights' gradients to ``refs``."""
        values = self._values(weights=weights, fixed=fixed, side=side, refs=refs)
        run(self._second, values | dict(zip(self._crossing, crossing, strict=True)))

    def _values(self, **groups: Tree) -> dict[Name, Any]:
        """Map names to values.

        The values are the constants, and the leaves of each group under the names in the field of
        `_Inputs` that the keyword names.
        """
        values = dict(self._constants)
        for name, group in groups.items():
            values |= zip(getattr(self._inputs, name), jax.tree.leaves(group), strict=True)
        return values


def _new_ref(like: Any) -> Any:
    return jax.new_ref(vary(jnp.zeros_like(like), tuple(varying_axes(like))))
