"""One rank's part of the model, as functions that know neither schedule nor memory.

Letters: V chunks per rank, M microbatches. Weights are given to each function, so that it can be
differentiated: `pipeline.core.rank.local_model` has the ways back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import STAGE, vary
from collectives.compat import without_refs
from pipeline.base.precision import as_computed
from pipeline.base.tree import Index, Leaves, Tree, at, blank, pick, real
from pipeline.core.model.added_losses import Adding, adding_losses, counted
from pipeline.core.model.loss import LossFn, LossModule, Metrics, same_over_others, take_loss
from pipeline.core.model.randomness import fold, own_axes, split_streams
from pipeline.core.model.stage import Seat
from pipeline.core.rank.checks import naming
from pipeline.core.rank.held import Usage, state_paths, usage_of, with_values
from pipeline.core.rank.messages import checked, noted
from pipeline.core.rank.state import Lazy, RankState


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

    def embed(self, weights: Leaves, inputs: Tree, microbatch: Any, *, now: bool = False) -> Tree:
        """The input of stage 0; ``now`` for the forward that writes state."""
        if not self.model.has_embed:
            return self.state.varied(self._computed(inputs))
        own = self.state.embeds_own

        def run(weights: Leaves) -> Tree:
            y, _ = self._ends_and_state(weights, microbatch, embedded, inputs, own, now=now)
            return checked("embed", y)

        return self.state.varied(self._computed(self._pure(run)(weights)))

    def stage(self, weights: Leaves, fixed: Tree, side: Tree, x: Tree) -> Tree:
        """The output of a stage.

        Args:
          weights: its parameters, and `probes` where it adds losses.
          fixed: its state that is neither parameters nor random streams.
          side: its random streams and extras for one microbatch; with checks also where it is.
          x: its input.
        """
        return self.stage_and_state(weights, fixed, side, x, ())[0]

    def stage_and_state(
        self, weights: Leaves, fixed: Tree, side: Tree, x: Tree, paths: Sequence[Any]
    ) -> tuple[Tree, list[Leaves]]:
        """The output of a stage, and the variables at some paths as it leaves them."""
        streams, extras, *where = side

        def run(weights: Leaves, x: Tree) -> tuple[Tree, list[Leaves]]:
            own, probes = self._apart(weights, self.params_tree.num_leaves)
            params = jax.tree.unflatten(self.params_tree, self._computed(own))
            rest = nnx.merge_state(streams, fixed)
            with self._adding(probes, adds=self.adds):
                update = self._seat.definition.update
                y, values = update(called, params, rest, x, extras, paths=paths)
            return checked("a stage", y), values

        if where:
            run = naming(run, *where)
        run = self._pure(run)
        if self.model.policy is not None:
            run = jax.checkpoint(run, policy=self.model.policy)
        y, values = run(weights, x)
        return self.state.varied(self._computed(y)), vary(values, self.axes)

    @property
    def state_paths(self) -> list[Any]:
        """Paths of a stage's state that may be written, in its order."""
        return state_paths(self.fixed[self.home], self._seat.definition.state)

    @property
    def writes(self) -> bool:
        """True if a stage's forward writes any of it."""
        held = self.state.held
        return held is not None and held.writes[self._seat.rank, self._seat.chunk]

    def stage_usage(self) -> Usage:
        """Find how a stage uses the state that it may write."""
        weights, fixed, side = self.stage_arguments(self.home, 0)
        paths, flat = self.state_paths, dict(nnx.to_flat_state(fixed))

        def run(values: list[Leaves]) -> tuple[Tree, list[Leaves]]:
            found = with_values(flat, paths, values)
            x = blank(self.activation, ())
            return self.stage_and_state(weights, found, side, x, paths)

        return usage_of(run, [jax.tree.leaves(flat[path]) for path in paths])

    def keep(self, chunk: Index, microbatch: Any, values: list[Leaves], real: Any = True) -> None:
        """Leave what a stage's forward has written."""
        self.state.held.write(self._seat, chunk, microbatch, values, real=real)

    def _pure(self, run: Callable[..., Tree]) -> Callable[..., Tree]:
        """A part of the model as a function of its arguments, with values in place of refs."""
        return without_refs(run) if self.state.has_refs else run

    def _computed(self, tree: Tree) -> Tree:
        """Parameters or activations in the dtype to compute in."""
        return as_computed(tree, self.model.compute_dtype)

    def outputs(self, weights: Leaves, y: Tree, microbatch: Any) -> Tree:
        """Compute the user's outputs from the last stage's output."""
        if not self.model.has_head:
            return y
        own = own_axes(y, self.axes)
        with noted("head", y):
            found, _ = self._ends_and_state(weights, microbatch, headed, y, own)
            return vary(checked("head", found, "its outputs"), self.axes)

    def features(self, weights: Leaves, y: Tree, microbatch: Any) -> jax.Array:
        """Compute a shared head's factors of the logits."""
        own = own_axes(y, self.axes)

        def run(weights: Leaves, y: Tree) -> Tree:
            return self._ends_and_state(weights, microbatch, featured, y, own)[0]

        return cast("jax.Array", vary(self._pure(run)(weights, y), self.axes))

    def loss(self, weights: Leaves, y: Tree, microbatch: Any) -> tuple[jax.Array, Leaves]:
        """The sum of one microbatch's loss, a float32 scalar; its weight, and sums for metrics."""

        def run(weights: Leaves, y: Tree) -> tuple[jax.Array, Leaves]:
            return self._loss_and_metrics(weights, y, microbatch)[0]

        return self._pure(run)(weights, y)

    def _loss_and_metrics(
        self, weights: Leaves, y: Tree, microbatch: Any
    ) -> tuple[tuple[jax.Array, Leaves], Metrics | None]:
        """As `loss`, and how metrics are made of the sums."""
        outputs = self.outputs(weights, y, microbatch)
        targets = at(self.batch.targets, microbatch)
        loss_fn = self.loss_fn(weights, microbatch)
        with noted("loss_fn", (outputs, targets)):
            taken = take_loss(loss_fn, outputs, targets, has_aux=self.model.has_aux)
        weight = jax.lax.stop_gradient(taken.weight)
        found = self._over_weight(taken.total, taken.weight - weight), [weight, *taken.sums]
        found = same_over_others("loss_fn", vary(found, self.axes), self.axes)
        return cast("tuple[jax.Array, Leaves]", found), taken.metrics

    def _over_weight(self, total: jax.Array, change: jax.Array) -> jax.Array:
        """The sum, with the gradient of sum / weight times the weight, if that has a gradient too.

        Args:
          total: of a microbatch.
          change: that of its weight: 0, with the weight's gradient.
        """
        if self.state.mean is None:
            return total
        return total - vary(self.state.mean, self.axes) * change

    @functools.cached_property
    def metrics(self) -> tuple[Leaves, Metrics | None]:
        """The types of the sums that metrics are made of, and how; found by a trace."""
        if not self.model.has_aux:
            return [], None
        y, found = blank(self.output, self.axes), list[Metrics | None]()

        def measured() -> Leaves:
            (_, (_, *sums)), metrics = self._loss_and_metrics(self.ends_weights, y, 0)
            found.append(metrics)
            return sums

        return jax.eval_shape(measured), found[0]

    def loss_fn(self, weights: Leaves, microbatch: Any) -> LossFn:
        """Make the loss function of one microbatch's outputs and targets."""
        if not isinstance(self.model.loss_fn, LossModule):
            return cast("LossFn", self.model.loss_fn)

        def call(outputs: Tree, targets: Tree) -> Any:
            own = own_axes(outputs, self.axes)
            return self._ends_and_state(weights, microbatch, lost, (outputs, targets), own)[0]

        return call

    def stage_arguments(
        self, chunk: Index, microbatch: Any, *, now: bool = False
    ) -> tuple[Leaves, Tree, Tree]:
        """Arguments of `stage` before its input; ``now`` for the forward that writes state."""
        own = own_axes(self.activation, self.axes)
        streams = fold(pick(self.streams, chunk), microbatch, self.axes, own)
        side = streams, self.batch.extras_of(microbatch), *self._where(chunk, microbatch)
        fixed = pick(self.fixed if self.state.held is None else self._held(microbatch, now), chunk)
        if not self.state.gathers:
            weights = pick(self.weights, chunk)
        else:
            whole, views = self.state.gathered(chunk, microbatch), self._seat.views
            weights = whole if views is None else views.params.leaves(whole)
        return [*weights, *self.probes(adds=self.adds)], fixed, side

    # --- losses that are added ---

    def probes(self, *, adds: bool) -> Leaves:
        """Probes after the weights of layers that add losses: a zero whose gradient they are."""
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
        self, stage: Any, weights: Leaves, fixed: Tree, side: Tree, x: Tree
    ) -> tuple[Tree, jax.Array]:
        """As `stage`, or as it does with its state, and the sum of the losses that it adds."""
        *own, probe = weights
        return counted(lambda probe: stage([*own, probe], fixed, side, x), probe)

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

    def _held(self, microbatch: Any, now: bool) -> Sequence[Tree]:
        """[V] as `fixed`, with the state that a microbatch is to see."""

        def others(chunk: int) -> Tree:
            leaves = self.state.held.leaves(chunk, microbatch, now=now)
            if self._seat.views is not None:
                return split_streams(self._seat.views.rest.tree(leaves))[1]
            structure = jax.tree.structure(self.state.weights.chunks_rest[chunk])
            return split_streams(jax.tree.unflatten(structure, leaves))[1]

        return Lazy(self.num_chunks, others)

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

    def _ends_and_state(
        self,
        weights: Leaves,
        microbatch: Any,
        method: Any,
        given: Tree,
        own: tuple[str, ...],
        *,
        now: bool = True,
        paths: Sequence[Any] = (),
        values: list[Leaves] | None = None,
    ) -> tuple[Tree, list[Leaves]]:
        """Call a method of the ends, and return its result and the variables at some paths
        afterwards.
        """
        structure: Any = jax.tree.structure(self.state.weights.ends)
        weights, probes = self._apart(weights, structure.num_leaves)
        params = jax.tree.unflatten(structure, self._computed(weights))
        streams, fixed = self.state.ends_streams
        if self.state.held is not None:
            leaves = self.state.held.leaves(None, microbatch, now=now)
            whole = jax.tree.unflatten(jax.tree.structure(self.state.weights.ends_rest), leaves)
            fixed = split_streams(whole)[1]
        if values is not None:
            fixed = with_values(dict(nnx.to_flat_state(fixed)), paths, values)
        rest = nnx.merge_state(fold(streams, microbatch, self.axes, own), fixed)
        with self._adding(probes, adds=self.state.adding_ends):
            found, after = self.model.ends.update(method, params, rest, given, paths=paths)
        return found, vary(after, self.axes)

    def head_and_state(
        self, weights: Leaves, y: Tree, microbatch: Any
    ) -> tuple[Tree, list[Leaves]]:
        """Compute the user's outputs, and the ends' state afterwards."""
        own, paths = own_axes(y, self.axes), self.ends_paths
        return self._ends_and_state(weights, microbatch, headed, y, own, paths=paths)

    @property
    def ends_paths(self) -> list[Any]:
        """Paths of the ends' state that may be written, in its order."""
        return state_paths(self.state.ends_streams[1], self.model.ends.state)

    def embed_and_state(
        self, weights: Leaves, inputs: Tree, microbatch: Any, values: list[Leaves] | None = None
    ) -> tuple[Tree, list[Leaves]]:
        """The input of stage 0, and the ends' state behind it."""
        own, paths = self.state.embeds_own, self.ends_paths
        given = weights, microbatch, embedded, inputs, own
        return self._ends_and_state(*given, paths=paths, values=values)

    def loss_and_state(
        self, weights: Leaves, y: Tree, microbatch: Any, values: list[Leaves] | None = None
    ) -> tuple[Tree, list[Leaves]]:
        """Compute the head's result, and the ends' state after head and loss."""
        own, paths = own_axes(y, self.axes), self.ends_paths
        found, outputs, after = None, y, values
        if self.model.has_head:
            given = weights, microbatch, headed, y, own
            outputs, after = self._ends_and_state(*given, paths=paths, values=after)
        if isinstance(self.model.loss_fn, LossModule):
            pair, own = (outputs, at(self.batch.targets, microbatch)), own_axes(outputs, self.axes)
            found, after = self._ends_and_state(
                weights, microbatch, lost, pair, own, paths=paths, values=after
            )
        if after is None:
            after = [jax.tree.leaves(v) for v in self._ends_values()]
        return (outputs, found), after

    def keep_of_embed(self, inputs: Tree, microbatch: Any, real: Any = True) -> None:
        """Leave what embed has written; it is called once more, which the compiler sees."""
        held = self.state.held
        if held is not None and held.writes_ends and self.model.has_embed:
            _, after = self.embed_and_state(self.ends_weights, inputs, microbatch)
            held.write_ends(("embed",), microbatch, after, real)

    def keep_of_head(self, y: Tree, microbatch: Any, real: Any = True) -> None:
        """Leave what head and loss have written; likewise."""
        held = self.state.held
        if held is not None and held.writes_ends:
            _, after = self.loss_and_state(self.ends_weights, y, microbatch)
            held.write_ends(("head", "loss_fn"), microbatch, after, real)

    def _ends_values(self) -> list[Any]:
        flat = dict(nnx.to_flat_state(self.state.ends_streams[1]))
        return [flat[path] for path in self.ends_paths]

    def ends_usage(self) -> Usage:
        """Find how embed, head and loss use the state that they may write."""
        values = [jax.tree.leaves(v) for v in self._ends_values()]
        if not values:
            return (), ()
        inputs = at(self.batch.inputs, 0)
        written = read = [False] * len(jax.tree.leaves(values))

        def embed(values: list[Leaves]) -> tuple[Tree, list[Leaves]]:
            return self.embed_and_state(self.ends_weights, inputs, 0, values)

        def loss(values: list[Leaves]) -> tuple[Tree, list[Leaves]]:
            return self.loss_and_state(self.ends_weights, blank(self.output, self.axes), 0, values)

        found = [usage_of(embed, values)] if self.model.has_embed else []
        found.append(usage_of(loss, values))
        for a, b in found:
            written = [x or y for x, y in zip(written, a, strict=True)]
            read = [x or y for x, y in zip(read, b, strict=True)]
        return tuple(written), tuple(read)


# What is done with modules: functions of a name, so that two calls can be seen to be the same.


def called(stage: Any, x: Tree, extras: dict[str, Tree]) -> Tree:
    """A stage's output."""
    return stage(x, **extras)


def embedded(ends: Any, inputs: Tree) -> Tree:
    """The input of stage 0."""
    return ends.embed(inputs)


def headed(ends: Any, y: Tree) -> Tree:
    """Apply the head to the last stage's output."""
    return ends.head(y)


def lost(ends: Any, given: tuple[Tree, Tree]) -> Any:
    """Apply a loss that is a module to outputs and targets."""
    return ends.loss_fn(*given)


def featured(ends: Any, y: Tree) -> Tree:
    """Compute a shared head's factors of the logits."""
    return ends.head.features(y)
