"""One rank's part of the model, as functions that know neither schedule nor memory.

Letters: V chunks per rank, M microbatches, b rows of a microbatch on one data shard. A cell lives
inside `jax.shard_map`: every array is a rank's local one and varies over all axes the pipeline
uses, so that no gradient is reduced before the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import vary
from pipeline.accumulate import Pullback, differentiate
from pipeline.backward import Linearize, SplitBackward
from pipeline.boundary import follow_alike
from pipeline.ends import see_that_activations_are_alike, see_that_they_are_words
from pipeline.lanes import Lane, SharedHalves, SharedResiduals, make_lanes
from pipeline.loss import LossFn, as_sum_and_weight, is_mean, same_over_others
from pipeline.model import Batch, Model, Weights
from pipeline.primitives import barrier
from pipeline.randomness import fold, split_streams
from pipeline.residuals import Residuals, stage_pullback
from pipeline.seen import Lazy, code
from pipeline.spread import gather
from pipeline.tree import (
    Index,
    Leaves,
    Tree,
    at,
    blank,
    combine,
    partition,
    pick,
    signature,
    vary_like,
)


class Cell:
    """A rank's weights and the functions made of them.

    Args:
      model: the static half.
      weights: this rank's state, without the leading axis of chunks.
      batch: this data shard's microbatches.
      axes: the mesh axes over which everything varies. Over others (``tensor``) only that varies
        which is sharded over them, and what follows from it.
      gathers: whether a chunk's weights are sharded over ``data`` and made whole by every action.

    Attributes:
      states: all state of the rank; weights: [V] lists of the leaves of its parameters.
      shards: [V] the same, sharded over ``data``, if actions gather them.
      ends_weights: leaves of embed and head.
      activation, output: trees of types, a stage's input and the last stage's output.
      wire: a tree of types, a message.
      lanes: of stages that are not alike; none where all are, as in the `Cell` of one lane.
      home: a chunk that has stages of this kind.
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
    ) -> None:
        weights, self.batch = vary(weights, axes), vary(batch, axes)
        self.model, self.axes = model, axes
        self.num_chunks = len(weights.chunks)
        self.weights: Sequence[Leaves] = [jax.tree.leaves(params) for params in weights.chunks]
        self.shards: Any = self.weights if gathers else None
        if gathers:
            self.weights = Lazy(self.num_chunks, lambda chunk: self._gathered(chunk, 0))
        self.ends_weights = jax.tree.leaves(weights.ends)
        self.states = weights
        self.chunk_tree: Any = jax.tree.structure(weights.chunks[0])
        self._ends_tree = jax.tree.structure(weights.ends)
        states = [split_streams(rest) for rest in weights.chunks_rest]
        self.streams: Sequence[Tree] = [streams for streams, _ in states]
        self.fixed: Sequence[Tree] = [fixed for _, fixed in states]
        self._ends_streams, self._ends_fixed = split_streams(weights.ends_rest)
        self.lanes: tuple[Lane, ...] = ()
        self.home = 0
        self.loss_share = 1.0
        self._further: Any = None
        self._follow_activations()

    # --- the model on trees; weights are given, so that they can be differentiated ---

    def embed(self, weights: Leaves, inputs: Tree, microbatch: Any) -> Tree:
        """The input of stage 0."""
        if not self.model.has_embed:
            return self.varied(inputs)
        return self.varied(self._ends(weights, microbatch, lambda ends: ends.embed(inputs)))

    def stage(self, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> Tree:
        """The output of a stage.

        Args:
          weights: its parameters.
          fixed: its state that is neither parameters nor random streams.
          side: its random streams and extras for one microbatch.
          x: its input.
        """
        streams, extras = side

        def run(weights: Leaves, x: Tree) -> Tree:
            params = jax.tree.unflatten(self.chunk_tree, weights)
            rest = nnx.merge_state(streams, fixed)
            return self.model.chunk.call(lambda module: module(x, **extras), params, rest)

        if self.model.policy is not None:
            run = jax.checkpoint(run, policy=self.model.policy)
        return self.varied(run(weights, x))

    def varied(self, x: Tree) -> Tree:
        """What passes between stages: all of it varies as any of it does."""
        x = vary(x, self.axes)
        return x if self._further is None else vary_like(x, self._further)

    def outputs(self, weights: Leaves, y: Tree, microbatch: Any) -> Tree:
        """What the user sees of the last stage's output."""
        if not self.model.has_head:
            return y
        return vary(self._ends(weights, microbatch, lambda ends: ends.head(y)), self.axes)

    def features(self, weights: Leaves, y: Tree, microbatch: Any) -> jax.Array:
        """What a head that all ranks share makes its logits of."""
        found = self._ends(weights, microbatch, lambda ends: ends.head.features(y))
        return cast("jax.Array", vary(found, self.axes))

    def loss(self, weights: Leaves, y: Tree, microbatch: Any) -> tuple[jax.Array, jax.Array]:
        """(sum, weight) of one microbatch, float32 scalars."""
        outputs = self.outputs(weights, y, microbatch)
        targets = at(self.batch.targets, microbatch)
        loss_fn = cast("LossFn", self.model.loss_fn)
        return same_over_others(
            "loss_fn", vary(as_sum_and_weight(loss_fn, outputs, targets), self.axes), self.axes
        )

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

    def _ends(self, weights: Leaves, microbatch: Any, method: Any) -> Tree:
        params = jax.tree.unflatten(self._ends_tree, weights)
        streams = fold(self._ends_streams, microbatch, self.axes)
        rest = nnx.merge_state(streams, self._ends_fixed)
        return self.model.ends.call(method, params, rest)

    # --- the same, to be differentiated over (weights, float leaves of what is given) ---

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
        return differentiate(f, self.ends_weights, floats, grad_dtype=self.model.grad_dtype)

    def stage_pullback(self, chunk: Index, microbatch: Any, x: Tree) -> tuple[Tree, Pullback]:
        """A stage's output; over its weights and its input."""
        return self._linearize(*self.stage_arguments(chunk, microbatch), x)

    def _linearize(self, *arguments: Any) -> tuple[Tree, Pullback]:
        return stage_pullback(self.stage, *arguments, grad_dtype=self.model.grad_dtype)

    def stage_arguments(self, chunk: Index, microbatch: Any) -> tuple[Leaves, Tree, Tree]:
        """What `stage` takes before its input."""
        streams = fold(pick(self.streams, chunk), microbatch, self.axes)
        side = streams, at(self.batch.extras, microbatch)
        if self.shards is None:
            return pick(self.weights, chunk), pick(self.fixed, chunk), side
        return self._gathered(chunk, microbatch), pick(self.fixed, chunk), side

    def _gathered(self, chunk: Index, microbatch: Any) -> Leaves:
        """A chunk's weights, whole."""
        shards = pick(self.shards, chunk)
        if not isinstance(microbatch, int):
            # The same in every tick, but not to be gathered once and kept.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        spreads = self.model.layout.chunks[chunk if isinstance(chunk, int) else 0]
        return gather(shards, spreads, lead=1)

    def residuals(self) -> Any:
        """A stage's pullback taken apart into a forward and a backward function."""
        if self.lanes:
            return SharedResiduals(self)
        arguments = *self.stage_arguments(self.home, 0), blank(self.activation, self.axes)
        return Residuals(self.stage, *arguments, grad_dtype=self.model.grad_dtype)

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
        grad_dtype = self.model.grad_dtype
        return SplitBackward(linearize, *arguments, in_place=in_place, grad_dtype=grad_dtype)

    def _follow_activations(self) -> None:
        inputs = at(self.batch.inputs, 0)
        if self.model.tables.embed >= 0:
            see_that_they_are_words(inputs)

        def first() -> Tree:
            return self.embed(self.ends_weights, inputs, 0)

        def widen(x: Tree) -> None:
            self._further = x

        found = follow_alike(self, first, widen)
        self.activation, self.output = found[0], found[-1]
        self.wire: Tree = self.activation
        if self.model.tables.is_used:
            see_that_activations_are_alike(found)
        codes = {code(self, seat) for seat in self.model.stages}
        if len(codes) > 1 or len(set(map(signature, found))) > 1:
            self.wire, self.lanes = make_lanes(self, found)
        else:
            self.output = self.activation
