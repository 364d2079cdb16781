"""One rank's part of the model, as functions that know neither schedule nor memory.

Letters: V chunks per rank, M microbatches, b rows of a microbatch on one data shard. What runs
lives inside `jax.shard_map`: every array is a rank's local one and varies over all axes the
pipeline uses, so that no gradient is reduced before the end of the step. Weights are given to each
function, so that it can be differentiated: `pipeline.rank.cell` has the ways back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
from flax import nnx

from collectives import vary
from pipeline.base.precision import as_computed
from pipeline.base.tree import Index, Leaves, Tree, at, pick, vary_like
from pipeline.jaxpr.primitives import barrier
from pipeline.model.loss import LossFn, LossModule, as_sum_and_weight, same_over_others
from pipeline.model.model import Batch, Model, Weights
from pipeline.model.overlay import View
from pipeline.model.randomness import fold, own_axes, split_streams
from pipeline.rank.seen import Lazy
from pipeline.sharding.spread import gather


class Forward:
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
      view: where a stage's weights lie in those of its chunk, if stages are not alike.
      ends_weights: leaves of embed and head, of a state of structure ends_tree; ends_streams: their
        random streams.
      activation: a tree of types, a stage's input, once that is known.
      embeds_own: axes of which each rank has its own part of what embed gives.
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
        self.view: View | None = None
        if gathers:
            self.weights = Lazy(self.num_chunks, lambda chunk: self._gathered(chunk, 0))
        self.ends_weights = jax.tree.leaves(weights.ends)
        self.states = weights
        self.chunk_tree: Any = jax.tree.structure(weights.chunks[0])
        self.ends_tree = jax.tree.structure(weights.ends)
        states = [split_streams(rest) for rest in weights.chunks_rest]
        self.streams: Sequence[Tree] = [streams for streams, _ in states]
        self.fixed: Sequence[Tree] = [fixed for _, fixed in states]
        self.ends_streams, self._ends_fixed = split_streams(weights.ends_rest)
        self._further: Any = None
        self.activation: Tree = None
        self.embeds_own: tuple[str, ...] = ()

    def embed(self, weights: Leaves, inputs: Tree, microbatch: Any) -> Tree:
        """The input of stage 0."""
        if not self.model.has_embed:
            return self.varied(self._computed(inputs))
        own = self.embeds_own
        found = self._ends(weights, microbatch, embedded, inputs, own)
        return self.varied(self._computed(found))

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
            params = jax.tree.unflatten(self.chunk_tree, self._computed(weights))
            rest = nnx.merge_state(streams, fixed)
            return self.model.chunk.call(called, params, rest, x, extras)

        if self.model.policy is not None:
            run = jax.checkpoint(run, policy=self.model.policy)
        return self.varied(self._computed(run(weights, x)))

    def _computed(self, tree: Tree) -> Tree:
        """Parameters or activations in the dtype to compute in."""
        return as_computed(tree, self.model.compute_dtype)

    def varied(self, x: Tree) -> Tree:
        """What passes between stages: all of it varies as any of it does."""
        x = vary(x, self.axes)
        return x if self._further is None else vary_like(x, self._further)

    def outputs(self, weights: Leaves, y: Tree, microbatch: Any) -> Tree:
        """What the user sees of the last stage's output."""
        if not self.model.has_head:
            return y
        own = own_axes(y, self.axes)
        return vary(self._ends(weights, microbatch, headed, y, own), self.axes)

    def features(self, weights: Leaves, y: Tree, microbatch: Any) -> jax.Array:
        """What a head that all ranks share makes its logits of."""
        own = own_axes(y, self.axes)
        found = self._ends(weights, microbatch, featured, y, own)
        return cast("jax.Array", vary(found, self.axes))

    def loss(self, weights: Leaves, y: Tree, microbatch: Any) -> tuple[jax.Array, jax.Array]:
        """(sum, weight) of one microbatch, float32 scalars."""
        outputs = self.outputs(weights, y, microbatch)
        targets = at(self.batch.targets, microbatch)
        loss_fn = self.loss_fn(weights, microbatch)
        return same_over_others(
            "loss_fn", vary(as_sum_and_weight(loss_fn, outputs, targets), self.axes), self.axes
        )

    def loss_fn(self, weights: Leaves, microbatch: Any) -> LossFn:
        """What makes a loss of one microbatch's outputs and targets."""
        if not isinstance(self.model.loss_fn, LossModule):
            return cast("LossFn", self.model.loss_fn)

        def call(outputs: Tree, targets: Tree) -> Any:
            own = own_axes(outputs, self.axes)
            return self._ends(weights, microbatch, lost, (outputs, targets), own)

        return call

    def stage_arguments(self, chunk: Index, microbatch: Any) -> tuple[Leaves, Tree, Tree]:
        """What `stage` takes before its input."""
        own = own_axes(self.activation, self.axes)
        streams = fold(pick(self.streams, chunk), microbatch, self.axes, own)
        side = streams, at(self.batch.extras, microbatch)
        if self.shards is None:
            return pick(self.weights, chunk), pick(self.fixed, chunk), side
        return self._gathered(chunk, microbatch), pick(self.fixed, chunk), side

    def _gathered(self, chunk: Index, microbatch: Any) -> Leaves:
        """A stage's weights, whole."""
        shards = pick(self.shards, chunk)
        if not isinstance(microbatch, int):
            # The same in every tick, but not to be gathered once and kept.
            ties = [vary_like(microbatch, shard) for shard in shards]
            shards = [barrier(shard, tie)[0] for shard, tie in zip(shards, ties, strict=True)]
        spreads = self.model.layout.chunks[chunk if isinstance(chunk, int) else 0]
        whole = gather(shards, spreads, lead=1)
        return whole if self.view is None else self.view.leaves(whole)

    def _ends(
        self, weights: Leaves, microbatch: Any, method: Any, given: Tree, own: tuple[str, ...]
    ) -> Tree:
        params = jax.tree.unflatten(self.ends_tree, self._computed(weights))
        streams = fold(self.ends_streams, microbatch, self.axes, own)
        rest = nnx.merge_state(streams, self._ends_fixed)
        return self.model.ends.call(method, params, rest, given)


# What is done with modules: functions of a name, so that two calls can be seen to be the same.


def called(stage: Any, x: Tree, extras: dict[str, Tree]) -> Tree:
    """A stage's output."""
    return stage(x, **extras)


def embedded(ends: Any, inputs: Tree) -> Tree:
    """The input of stage 0."""
    return ends.embed(inputs)


def headed(ends: Any, y: Tree) -> Tree:
    """What the head makes of the last stage's output."""
    return ends.head(y)


def lost(ends: Any, given: tuple[Tree, Tree]) -> Any:
    """What a loss that is a module makes of outputs and targets."""
    return ends.loss_fn(*given)


def featured(ends: Any, y: Tree) -> Tree:
    """What a shared head makes its logits of."""
    return ends.head.features(y)
