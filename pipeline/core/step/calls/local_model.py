"""A rank's part of the model: stages, embed, head and loss, with their pullbacks.

All pullbacks are with respect to (weights, float leaves of the input).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.base.added import Adding, adding_losses
from pipeline.base.masks import NeedsGradient
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition, real
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.jaxpr.dead_code import lean
from pipeline.core.autodiff.jaxpr.reachability import needed_inputs
from pipeline.core.autodiff.jaxpr.reader import read_block
from pipeline.core.autodiff.jaxpr.steps import run_block
from pipeline.core.autodiff.outcome import MakeAdding, Outcome, outcome_and_pullback
from pipeline.core.autodiff.residuals import Residuals, stage_pullback
from pipeline.core.model.loss import LossMetrics
from pipeline.core.model.stage import StagePosition
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.forward import Forward
from pipeline.core.step.calls.rank import Rank


class LocalModel(Forward):
    """The stages of one kind on a rank, and embed, head and loss, with their pullbacks.

    Args:
      rank: the rank.
      position: the position of a stage of this kind.
      x: the types of a stage's input.
      y: the types of a stage's output.
      need: the gradients that a stage's backward computes.
      wire: the types of a message; equal to ``x`` if all stages are alike.
      carry: the types of the carry from a slice to later slices.
      earlier: the types of the longest slice's carry, if slices differ in length.
      adds: whether a stage adds losses.

    Attributes:
      trained: the mask of trained parameters.
    """

    def __init__(
        self,
        rank: Rank,
        position: StagePosition,
        x: Tree,
        y: Tree,
        need: NeedsGradient,
        wire: Tree,
        *,
        carry: Tree = (),
        earlier: Tree = None,
        adds: bool = False,
    ) -> None:
        super().__init__(rank, position, x, y, carry=carry, earlier=earlier, adds=adds)
        self.trained, self.wire, self.need = need.weights, wire, need

    @property
    def kinds(self) -> list[tuple[Sequence[int], LocalModel]]:
        """The indices of the stages of each kind, with their model: here one kind, this model."""
        return [(range(len(self.model.stages)), self)]

    @property
    def goes_back(self) -> bool:
        """True if a stage's backward computes anything."""
        return self.need.is_any or self.adds

    @property
    def sums_weights(self) -> bool:
        """True if the model adds to sums: gradients of weights, or losses."""
        return any(self.need.weights) or self.adds

    @functools.cached_property
    def metrics(self) -> tuple[Leaves, LossMetrics | None]:
        """The types of the sums for metrics, and the function from the sums to metrics."""
        return ends.metrics_of(self.rank, self.output)

    def loss_is_mean(self) -> tuple[bool, Any, Adding, Adding]:
        """Tell by a trace whether every microbatch's loss is a mean, and so has weight 1.

        Returns:
          The answer; the jaxpr of embed, head and loss as a function of their weights; and a record
          of added losses for embed, and one for the head.

        Raises:
          ValueError: loss_fn calls `add_loss`.
        """
        # One trace of all parts: the jaxpr shows which weights are read, and records show the parts
        # that call `add_loss`. Embed and head have separate records, because their added losses are
        # treated differently.
        rank = self.rank
        results: list[Any] = []

        def probe(weights: Leaves) -> Any:
            y = blank(self.output, self.axes)
            with adding_losses(Adding()) as of_head:
                outputs = ends.finish(rank, weights, y, 0, take_loss=False).value
            with adding_losses(Adding()) as of_loss:
                taken, _ = ends.take_loss_of(rank, weights, outputs, 0)
            if of_loss.is_used:
                raise ValueError(
                    "loss_fn called add_loss, which is for values that loss_fn does not receive; "
                    "add the value to the result of loss_fn"
                )
            with adding_losses(Adding()) as of_embed:
                embedded = ends.embed(rank, weights, at(self.batch.inputs, 0), 0).value
            results.extend([taken.is_mean, of_embed, of_head])
            return embedded, taken.total, taken.weight

        body = jax.make_jaxpr(probe)(self.ends_weights).jaxpr
        is_mean, of_embed, of_head = results
        return is_mean, body, of_embed, of_head

    def weight_has_gradient(self) -> bool:
        """Tell by a trace whether the weight of a loss (sum, weight) has a gradient.

        A count has no gradient, and neither has a weight that depends only on targets.
        """
        y = blank(self.output, self.axes)
        floats, others = partition(y)
        primals = self.ends_weights, floats

        def weigh(weights: Leaves, floats: Leaves) -> jax.Array:
            return vary(self._weight(weights, combine(y, floats, others), 0), self.axes)

        def back(primals: Any, ct: jax.Array) -> Any:
            return jax.vjp(ends.pure(self.rank, weigh), *primals)[1](ct)

        ct = vary(jnp.zeros((), real()), self.axes)
        # The weight has no gradient if the pullback's results do not depend on the cotangent: then
        # the pullback without dead code does not read its last input.
        closed = jax.make_jaxpr(back)(primals, ct)
        wanted = [True] * len(closed.jaxpr.outvars)
        return needed_inputs(lean(read_block(closed), wanted, ()), wanted, (), adds=False)[-1]

    def weight_of_targets(self) -> jax.Array | None:
        """Sum the weights of a data shard's losses; None if weights depend on more than targets.

        If slices differ in length, sum the weights of this model's slice in every microbatch.
        """
        # `pipeline.core.step.share` decides when the weight must be known before the step. No stage
        # has to run for the sum if the weight does not read outputs.
        targets, y = self.batch.targets, blank(self.output, self.axes)
        if (part := self.rank.slices.number) is not None:
            targets = jax.tree.map(lambda x: x[part :: self.rank.slices.count], targets)

        def weigh(y: Tree, of_one: Tree) -> jax.Array:
            return jax.lax.stop_gradient(self._weight(self.ends_weights, y, 0, targets=of_one))

        # The head runs in this trace, and is dead code in it if the weight does not read outputs.
        block = lean(read_block(jax.make_jaxpr(weigh)(y, at(targets, 0))), [True], ())
        leaves = jax.tree.leaves(y)
        if any(needed_inputs(block, [True], (), adds=False)[: len(leaves)]):
            return None

        def add(total: jax.Array, of_one: Tree) -> tuple[jax.Array, None]:
            return total + run_block(block, [*leaves, *jax.tree.leaves(of_one)])[0], None

        return jax.lax.scan(add, vary(jnp.zeros((), real()), self.axes), targets)[0]

    def _weight(
        self, weights: Leaves, y: Tree, microbatch: int, *, targets: Tree = None
    ) -> jax.Array:
        outputs = ends.finish(self.rank, weights, y, microbatch, take_loss=False).value
        taken, _ = ends.take_loss_of(self.rank, weights, outputs, microbatch, targets=targets)
        return taken.weight

    def embed_pullback(self, microbatch: Any) -> tuple[Outcome, Pullback]:
        """Call embed; return its outcome, and its pullback for the ends' weights and the inputs."""
        inputs = at(self.batch.inputs, microbatch)
        floats, others = partition(inputs)

        def f(weights: Leaves, leaves: Leaves) -> Outcome:
            whole = combine(inputs, leaves, others)
            return ends.embed(self.rank, weights, whole, microbatch)

        return self._ends_pullback(f, floats, "embed")

    def loss_pullback(self, y: Tree, microbatch: Any) -> tuple[Outcome, Pullback]:
        """Call `finish`; return its outcome, and its pullback for the ends' weights and ``y``."""
        floats, others = partition(y)

        def f(weights: Leaves, leaves: Leaves) -> Outcome:
            return ends.finish(self.rank, weights, combine(y, leaves, others), microbatch)

        part = "head, or loss_fn," if self.model.has_head else "loss_fn"
        return self._ends_pullback(f, floats, part)

    def _ends_pullback(self, f: Any, floats: Leaves, part: str) -> tuple[Outcome, Pullback]:
        return outcome_and_pullback(
            f,
            self.ends_weights,
            floats,
            grad_dtype=self.model.grad_dtype,
            trained=self.model.trained.ends,
            adding=self.rank.adding if self.rank.facts.adding_ends else None,
            part=part,
        )

    def stage_pullback(
        self, chunk: int, microbatch: Any, x: Tree, *, late: bool = False
    ) -> tuple[Outcome, Pullback]:
        """Call a stage; return its outcome and pullback. `differentiate` explains ``late``."""
        return self._linearize(*self.stage_arguments(chunk, microbatch), x, late=late)

    def _linearize(self, *arguments: Any, late: bool = False) -> tuple[Outcome, Pullback]:
        # With no paths, the call returns no state, because F has already written it.
        stage = functools.partial(self.stage, paths=())
        return stage_pullback(stage, *arguments, **self._options, late=late, part=self.part_name)

    @property
    def _options(self) -> dict[str, Any]:
        adding: MakeAdding | None = self.rank.adding if self.adds else None
        return {"grad_dtype": self.model.grad_dtype, "need": self.need, "adding": adding}

    @property
    def part_name(self) -> str:
        """The name of the first stage of this kind."""
        k = next(k for k, position in enumerate(self.model.stages) if position is self._position)
        return f"stages[{k}]"

    def residuals(self) -> Any:
        """Split a stage's pullback into a forward function and a backward function."""
        arguments = *self.stage_arguments(self.home, 0), self.blank
        gathers = self.model.gathers_again
        return Residuals(
            self.stage, *arguments, **self._options, gathers=gathers, part=self.part_name
        )

    def split_backward(self, residuals: Any) -> Any:
        """Split a stage's backward into two halves, from residuals or from the stage's input."""
        # A local import: most timetables have no I and W, and do not need the module.
        from pipeline.core.autodiff.split_backward import SplitBackward

        # Only the types of these example arguments matter. With slices, a stage's input includes
        # earlier carries, which are not stashed, so residuals and carries form a pair.
        stash, home = self.blank, self.home
        (dy, _) = partition((blank(self.output, self.axes), blank(self.carry, self.axes)))
        linearize: Any = self._linearize
        if residuals is not None and self.rank.slices.count > 1:
            linearize = lambda w, fixed, side, both: (  # noqa: E731
                None,
                residuals.backward(w, fixed, side, *both),
            )
            stash = blank(residuals.stashed, self.axes), stash.earlier
        elif residuals is not None:
            linearize = lambda *arguments: (None, residuals.backward(*arguments))  # noqa: E731
            stash = blank(residuals.stashed, self.axes)
        arguments = *self.stage_arguments(home, 0), stash, dy
        return SplitBackward(linearize, *arguments, **self._options)
