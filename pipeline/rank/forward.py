"""One rank's part of the model, as functions that know neither schedule nor memory.

Letters: V chunks per rank, M microbatches. Weights are given to each function, so that it can be
differentiated: `pipeline.rank.local_model` has the ways back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import STAGE, vary
from pipeline.added_losses import Adding, adding_losses, counted
from pipeline.base.precision import as_computed
from pipeline.base.tree import Index, Leaves, Tree, at, blank, pick, real
from pipeline.model.loss import LossFn, LossModule, Metrics, same_over_others, take_loss
from pipeline.model.randomness import fold, own_axes, split_streams
from pipeline.model.stage import Seat
from pipeline.rank.checks import naming
from pipeline.rank.state import Lazy, RankState


class Forward:
    """The stages of one kind, and embed, head and loss, as functions of a rank's weights.

    Args:
      state: what the rank holds.
      seat: that of a stage of this kind.
      x: a tree of types, such a stage's input; None as long as that is not known.
      y: the type of its output, likewise.
      adds: whether such a stage adds losses.

    Attributes:
      model, batch, axes: those of the state.
      home: a chunk that has stages of this kind.
      weights: [V] lists of the leaves of the parameters that such a stage has in each chunk;
        params_tree: their structure.
      streams, fixed: [V] its random streams, and what else of its state is no parameter.
      ends_weights: leaves of embed and head.
      activation, output: x and y.
    """

    def __init__(
        self, state: RankState, seat: Seat, x: Tree = None, y: Tree = None, *, adds: bool = False
    ) -> None:
        self.state, self._seat = state, seat
        self.model, self.batch, self.axes = state.model, state.batch, state.axes
        self.home, self.num_chunks = seat.chunk, state.num_chunks
        self.activation, self.output, self.adds = x, y, adds
        self.ends_weights = state.ends
        self._metrics: Metrics | None = None
        self.weights: Sequence[Leaves]
        self.streams: Sequence[Tree]
        self.fixed: Sequence[Tree]
        self.params_tree: Any
        if seat.views is None:
            self.params_tree = jax.tree.structure(state.weights.chunks[seat.chunk])
            self.weights = state.chunks
            self.streams = [streams for streams, _ in state.streams]
            self.fixed = [fixed for _, fixed in state.streams]
            return
        params, rest = seat.views.params, seat.views.rest

        def others(chunk: int) -> tuple[Tree, Tree]:
            return split_streams(rest.tree(jax.tree.leaves(state.weights.chunks_rest[chunk])))

        self.params_tree = params.treedef
        self.weights = Lazy(self.num_chunks, lambda chunk: params.leaves(state.chunks[chunk]))
        self.streams = Lazy(self.num_chunks, lambda chunk: others(chunk)[0])
        self.fixed = Lazy(self.num_chunks, lambda chunk: others(chunk)[1])

    def embed(self, weights: Leaves, inputs: Tree, microbatch: Any) -> Tree:
        """The input of stage 0."""
        if not self.model.has_embed:
            return self.state.varied(self._computed(inputs))
        own = self.state.embeds_own
        found = self._ends(weights, microbatch, embedded, inputs, own)
        return self.state.varied(self._computed(found))

    def stage(self, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> Tree:
        """The output of a stage.

        Args:
          weights: its parameters, and `probes` where it adds losses.
          fixed: its state that is neither parameters nor random streams.
          side: its random streams and extras for one microbatch; with checks also where it is.
          x: its input.
        """
        streams, extras, *where = side

        def run(weights: Leaves, x: Tree) -> Tree:
            own, probes = self._apart(weights, self.params_tree.num_leaves)
            params = jax.tree.unflatten(self.params_tree, self._computed(own))
            rest = nnx.merge_state(streams, fixed)
            with self._adding(probes, adds=self.adds):
                return self._seat.definition.call(called, params, rest, x, extras)

        if where:
            run = naming(run, *where)
        if self.model.policy is not None:
            run = jax.checkpoint(run, policy=self.model.policy)
        return self.state.varied(self._computed(run(weights, x)))

    def _computed(self, tree: Tree) -> Tree:
        """Parameters or activations in the dtype to compute in."""
        return as_computed(tree, self.model.compute_dtype)

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

    def loss(self, weights: Leaves, y: Tree, microbatch: Any) -> tuple[jax.Array, Leaves]:
        """The sum of one microbatch's loss, a float32 scalar; its weight, and sums for metrics."""
        outputs = self.outputs(weights, y, microbatch)
        targets = at(self.batch.targets, microbatch)
        loss_fn = self.loss_fn(weights, microbatch)
        taken = take_loss(loss_fn, outputs, targets, has_aux=self.model.has_aux)
        found = taken.total, [taken.weight, *taken.sums]
        self._metrics = taken.metrics
        found = same_over_others("loss_fn", vary(found, self.axes), self.axes)
        return cast("tuple[jax.Array, Leaves]", found)

    def metrics(self) -> tuple[Leaves, Metrics | None]:
        """The types of the sums that metrics are made of, and how; found by a trace."""
        if not self.model.has_aux:
            return [], None
        y = blank(self.output, self.axes)
        _, (_, *sums) = jax.eval_shape(lambda: self.loss(self.ends_weights, y, 0))
        return sums, self._metrics

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
        side = streams, at(self.batch.extras, microbatch), *self._where(chunk, microbatch)
        if not self.state.gathers:
            weights = pick(self.weights, chunk)
        else:
            whole, views = self.state.gathered(chunk, microbatch), self._seat.views
            weights = whole if views is None else views.params.leaves(whole)
        return [*weights, *self.probes(adds=self.adds)], pick(self.fixed, chunk), side

    # --- losses that are added ---

    def probes(self, *, adds: bool) -> Leaves:
        """What stands behind the weights of what adds losses: a zero whose gradient they are."""
        return [vary(jnp.zeros((), real()), self.axes)] if adds else []

    def _apart(self, weights: Leaves, count: int) -> tuple[Leaves, Leaves]:
        return weights[:count], weights[count:]

    def _adding(self, probes: Leaves, *, adds: bool) -> contextlib.AbstractContextManager[Any]:
        """A context in which losses are added; without probes nobody asks what they sum up to."""
        if not adds:
            return contextlib.nullcontext()
        share = vary(jnp.asarray(self.state.added_share, real()), self.axes)
        probe = probes[0] if probes else self.probes(adds=True)[0]
        return adding_losses(Adding(share, probe))

    def stage_counted(
        self, weights: Leaves, fixed: Tree, side: Tree, x: Tree
    ) -> tuple[Tree, jax.Array]:
        """As `stage`, and the sum of the losses that it adds."""
        *own, probe = weights
        return counted(lambda probe: self.stage([*own, probe], fixed, side, x), probe)

    def embed_counted(self, inputs: Tree, microbatch: Any) -> tuple[Tree, jax.Array]:
        """As `embed`, and the sum of the losses that it adds."""
        (probe,) = self.probes(adds=True)
        own = self.ends_weights
        return counted(lambda probe: self.embed([*own, probe], inputs, microbatch), probe)

    def loss_counted(self, y: Tree, microbatch: Any) -> tuple[tuple[jax.Array, Leaves], jax.Array]:
        """As `loss`, and the sum of the losses that the head adds."""
        (probe,) = self.probes(adds=True)
        own = self.ends_weights
        found, added = counted(lambda probe: self.loss([*own, probe], y, microbatch), probe)
        return cast("tuple[jax.Array, Leaves]", found), added

    def _where(self, chunk: Index, microbatch: Any) -> list[tuple[jax.Array, jax.Array]]:
        """The numbers of stage and microbatch for the errors of checks, if there are any."""
        if not self.state.checks:
            return []
        seats = self.model.stages
        numbers = np.zeros((len(seats) // self.num_chunks, self.num_chunks), np.int32)
        for stage, seat in enumerate(seats):
            numbers[seat.rank, seat.chunk] = stage
        number = jnp.asarray(numbers)[jax.lax.axis_index(STAGE), chunk]
        return [(number, jnp.asarray(microbatch, jnp.int32))]

    def _ends(
        self, weights: Leaves, microbatch: Any, method: Any, given: Tree, own: tuple[str, ...]
    ) -> Tree:
        structure: Any = jax.tree.structure(self.state.weights.ends)
        weights, probes = self._apart(weights, structure.num_leaves)
        params = jax.tree.unflatten(structure, self._computed(weights))
        streams, fixed = self.state.ends_streams
        rest = nnx.merge_state(fold(streams, microbatch, self.axes, own), fixed)
        with self._adding(probes, adds=self.state.adding_ends):
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
