"""A rank's part of the model with its ways back: what of it is differentiated, and how.

Letters: V chunks per rank. The ways back are over (weights, float leaves of what is given). A cell
knows the types of what passes between stages, and whether those are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from collectives import vary
from pipeline.accumulate import Pullback, differentiate
from pipeline.backward import Linearize, SplitBackward
from pipeline.boundary import follow_alike
from pipeline.ends import see_that_activations_are_alike, see_that_they_are_words
from pipeline.forward import Forward
from pipeline.lanes import Lane, SharedHalves, SharedResiduals, make_lanes
from pipeline.loss import LossFn, is_mean
from pipeline.model import Batch, Model, Weights
from pipeline.randomness import own_axes
from pipeline.residuals import Residuals, stage_pullback
from pipeline.seen import code
from pipeline.trained import Way
from pipeline.tree import Index, Leaves, Tree, at, blank, combine, partition, signature


class Cell(Forward):
    """A rank's weights, the functions made of them, and their pullbacks.

    Arguments as for `Forward`, and ``ways``.

    Attributes:
      activation, output: trees of types, a stage's input and the last stage's output.
      wire: a tree of types, a message.
      lanes: of stages that are not alike; none where all are, as in the `Cell` of one lane.
      home: a chunk that has stages of this kind.
      ways: [K] how far each stage's backward goes; way: that of the stages of this lane.
      loss_share: what a microbatch's loss is multiplied with, to be differentiated.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        batch: Batch,
        axes: tuple[str, ...],
        *,
        gathers: bool = False,
        ways: Sequence[Way],
    ) -> None:
        super().__init__(model, weights, batch, axes, gathers=gathers)
        self.lanes: tuple[Lane, ...] = ()
        self.home = 0
        self.ways, self.way = ways, ways[0]
        self.loss_share = 1.0
        self._follow_activations()

    def loss_cotangent(self) -> jax.Array:
        """What a microbatch's loss is differentiated with."""
        return vary(jnp.full((), self.loss_share), self.axes)

    def loss_is_mean(self) -> bool:
        """Whether every microbatch's loss has weight 1; found by a trace."""
        found = []

        def probe() -> None:
            y = self.outputs(self.ends_weights, blank(self.output, self.axes), 0)
            loss_fn = cast("LossFn", self.model.loss_fn)
            found.append(is_mean(loss_fn, y, at(self.batch.targets, 0)))

        jax.eval_shape(probe)
        return found[0]

    def embed_pullback(self, microbatch: Any) -> tuple[Tree, Pullback]:
        """Stage 0's input; over the ends' weights and the inputs."""
        inputs = at(self.batch.inputs, microbatch)
        floats, others = partition(inputs)

        def f(weights: Leaves, leaves: Leaves) -> tuple[Leaves, Leaves]:
            return partition(self.embed(weights, combine(inputs, leaves, others), microbatch))

        x, x_others, pullback = self._differentiate_ends(f, floats)
        return combine(self.activation, x, x_others), pullback

    def loss_pullback(self, y: Tree, microbatch: Any) -> tuple[jax.Array, jax.Array, Pullback]:
        """Sum and weight of the loss; over the ends' weights and the last stage's output."""
        floats, others = partition(y)

        def f(weights: Leaves, leaves: Leaves) -> tuple[jax.Array, jax.Array]:
            return self.loss(weights, combine(y, leaves, others), microbatch)

        return self._differentiate_ends(f, floats)

    def _differentiate_ends(self, f: Any, floats: Leaves) -> tuple[Any, Any, Pullback]:
        return differentiate(
            f,
            self.ends_weights,
            floats,
            grad_dtype=self.model.grad_dtype,
            trained=self.model.trained.ends,
        )

    def stage_pullback(self, chunk: Index, microbatch: Any, x: Tree) -> tuple[Tree, Pullback]:
        """A stage's output; over its weights and its input."""
        return self._linearize(*self.stage_arguments(chunk, microbatch), x)

    def _linearize(self, *arguments: Any) -> tuple[Tree, Pullback]:
        return stage_pullback(
            self.stage, *arguments, grad_dtype=self.model.grad_dtype, way=self.way
        )

    def residuals(self) -> Any:
        """A stage's pullback taken apart into a forward and a backward function."""
        if self.lanes:
            return SharedResiduals(self)
        arguments = *self.stage_arguments(self.home, 0), blank(self.activation, self.axes)
        return Residuals(self.stage, *arguments, grad_dtype=self.model.grad_dtype, way=self.way)

    def split_backward(self, residuals: Any, *, in_place: bool) -> Any:
        """A stage's backward in two halves, from residuals or from the stage's input."""
        if self.lanes:
            return SharedHalves(self, residuals, in_place=in_place)
        x = blank(self.activation, self.axes)
        y = x if self.output is self.activation else blank(self.output, self.axes)
        (dy, _), home = partition(y), self.home
        linearize: Linearize = self._linearize
        stash = x
        if residuals is not None:
            linearize = lambda *arguments: (None, residuals.backward(*arguments))  # noqa: E731
            stash = blank(residuals.stashed, self.axes)
        arguments = *self.stage_arguments(home, 0), stash, dy
        return SplitBackward(
            linearize,
            *arguments,
            in_place=in_place,
            grad_dtype=self.model.grad_dtype,
            way=self.way,
        )

    def _follow_activations(self) -> None:
        inputs = at(self.batch.inputs, 0)
        if self.model.tables.embed >= 0:
            see_that_they_are_words(inputs)

        def first() -> Tree:
            return self.embed(self.ends_weights, inputs, 0)

        if self.model.has_embed and jax.tree.leaves(self.ends_streams):
            self.embeds_own = own_axes(jax.eval_shape(lambda: first()), self.axes)  # noqa: PLW0108

        def widen(x: Tree) -> None:
            self._further = x

        found = follow_alike(self, first, widen)
        self.activation, self.output = found[0], found[-1]
        self.wire: Tree = self.activation
        if self.model.tables.is_used:
            see_that_activations_are_alike(found)
        codes = {code(self, seat) for seat in self.model.stages}
        alike = len(codes) == len(set(map(signature, found))) == len(set(self.ways)) == 1
        if not alike:
            self.wire, self.lanes = make_lanes(self, found)
        else:
            self.output = self.activation
