"""Embed, head and loss of a rank as functions of their weights, for one microbatch.

Letters: M microbatches, b rows of a microbatch on one data shard. `embed` runs before the first
stage, `finish` after the last; both return an `Outcome`. Weights are arguments, so that a call can
be differentiated; all else is read from the rank's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import vary
from collectives.compat import without_refs
from pipeline.base.added import adding_losses
from pipeline.base.agreed.slices import FixedSlice, SequenceSlice
from pipeline.base.precision import as_computed
from pipeline.base.rows import batch_part_of
from pipeline.base.tree import Leaves, Tree, at, blank
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.model.added_losses import counted
from pipeline.core.model.loss import (
    LossFn,
    LossMetrics,
    LossModule,
    MicrobatchLoss,
    same_over_others,
    take_loss,
)
from pipeline.core.model.randomness import fold, own_axes, split_streams
from pipeline.core.step.calls.held import Usage, Values, state_paths, usage_of, with_values
from pipeline.core.step.calls.messages import checked, noted, types_text
from pipeline.core.step.calls.state import RankState


def embed(
    state: RankState,
    weights: Leaves,
    inputs: Tree,
    microbatch: Any,
    *,
    now: bool = False,
    values: Values | None = None,
) -> Outcome:
    """The input of stage 0.

    Args:
      state: the rank's.
      weights: of embed and head.
      inputs: [b, ...] leaves of the microbatch.
      microbatch: its index.
      now: whether this is the forward that writes declared state, and so reads it as it is.
      values: of all declared variables before the call, if not those of the rank's state.
    """
    if not state.model.has_embed:
        return Outcome(state.varied(computed(state, inputs)))
    paths = ends_paths(state) if values is not None or (now and _writes(state)) else []

    method: Any = embedded
    given = inputs
    if state.num_slices > 1:
        method, given = embedded_slice, (inputs, slice_of(state, microbatch))

    def run(weights: Leaves) -> tuple[Tree, Values]:
        own = state.embeds_own
        y, after = _call(
            state, weights, microbatch, method, given, own, now=now, paths=paths, values=values
        )
        return checked("embed", y), after

    def call() -> Outcome:
        y, after = pure(state, run)(weights)
        return Outcome(state.varied(computed(state, y)), state={"embed": after} if paths else {})

    return with_added(state, call, adds=state.adding_embed)


def finish(
    state: RankState,
    weights: Leaves,
    y: Tree,
    microbatch: Any,
    *,
    take_loss: bool = True,
    values: Values | None = None,
) -> Outcome:
    """The sum of a microbatch's loss, a float32 scalar; or the outputs that the user sees.

    Args:
      state: the rank's.
      weights: of embed and head.
      y: the last stage's output.
      microbatch: its index.
      take_loss: whether the value is the loss. Then the outcome's sums are the loss, its weight,
        and the sums that metrics are made of.
      values: of all declared variables before the call, if not those of the rank's state.
    """

    def call() -> Outcome:
        if not take_loss:
            return _outputs(state, weights, y, microbatch, values)
        run = pure(state, lambda weights, y: _finish(state, weights, y, microbatch, values)[0])
        outcome: Outcome = run(weights, y)
        return outcome

    return with_added(state, call, adds=state.adding_ends)


def _outputs(
    state: RankState, weights: Leaves, y: Tree, microbatch: Any, values: Values | None = None
) -> Outcome:
    """The result of the head."""
    if not state.model.has_head:
        return Outcome(y)
    own, paths = own_axes(y, state.axes), _paths(state, values)
    with noted("head", y, state.batch.extras):
        found, after = _call(state, weights, microbatch, headed, y, own, paths=paths, values=values)
        found = vary(checked("head", found, "its outputs"), state.axes)
    return Outcome(found, state={"finish": after} if paths else {})


def _finish(
    state: RankState, weights: Leaves, y: Tree, microbatch: Any, values: Values | None = None
) -> tuple[Outcome, LossMetrics | None]:
    """Head and loss, one after the other; also how metrics are made of the sums."""
    outputs = _outputs(state, weights, y, microbatch, values)
    written = dict(outputs.state)
    before = written.get("finish", values)
    taken, after = take_loss_of(state, weights, outputs.value, microbatch, values=before)
    if after is not None:
        written = {"finish": after}
    weight = jax.lax.stop_gradient(taken.weight)
    value = _over_weight(state, taken.total, taken.weight - weight)
    sums = {"loss": [taken.total], "weight": [weight], "metrics": taken.sums}
    value, sums = same_over_others("loss_fn", vary((value, sums), state.axes), state.axes)
    return Outcome(value, state=written, sums=sums), taken.metrics


def take_loss_of(
    state: RankState,
    weights: Leaves,
    outputs: Tree,
    microbatch: Any,
    *,
    targets: Tree = None,
    values: Values | None = None,
) -> tuple[MicrobatchLoss, Values | None]:
    """The loss of one microbatch's outputs, and the declared state after it, if a module has any.

    ``targets`` are those of the microbatch unless they are given.
    """
    after: Values | None = None
    targets = at(state.batch.targets, microbatch) if targets is None else targets

    def of_module(outputs: Tree, targets: Tree) -> Any:
        nonlocal after
        own, paths = own_axes(outputs, state.axes), _paths(state, values)
        given = outputs, targets
        found, left = _call(
            state, weights, microbatch, lost, given, own, paths=paths, values=values
        )
        after = left if paths else None
        return found

    is_module = isinstance(state.model.loss_fn, LossModule)
    loss_fn = of_module if is_module else cast("LossFn", state.model.loss_fn)
    with noted("loss_fn", (outputs, targets), state.batch.extras):
        options: dict[str, Any] = {"has_aux": state.model.has_aux, "share": state.share}
        taken = take_loss(loss_fn, outputs, targets, **options)
    return taken, after


def _over_weight(state: RankState, total: jax.Array, change: jax.Array) -> jax.Array:
    """The sum, with the gradient of sum / weight times the weight, if that has a gradient too.

    Args:
      state: the rank's.
      total: of a microbatch.
      change: that of its weight: 0, with the weight's gradient.
    """
    if state.mean is None:
        return total
    return total - vary(state.mean, state.axes) * change


def metrics_of(state: RankState, y: Tree) -> tuple[Leaves, LossMetrics | None]:
    """The types of the sums that metrics are made of, and how; found by a trace.

    Args:
      state: the rank's.
      y: types of the last stage's output.
    """
    if not state.model.has_aux:
        return [], None
    found = list[LossMetrics | None]()

    def measured() -> Leaves:
        outcome, metrics = _finish(state, state.ends, blank(y, state.axes), 0)
        found.append(metrics)
        return outcome.sums["metrics"]

    return jax.eval_shape(measured), found[0]


def features(state: RankState, weights: Leaves, y: Tree, microbatch: Any) -> jax.Array:
    """The array that a head which all ranks share makes its logits of."""
    own = own_axes(y, state.axes)

    def run(weights: Leaves, y: Tree) -> Tree:
        return _call(state, weights, microbatch, featured, y, own)[0]

    return cast("jax.Array", vary(pure(state, run)(weights, y), state.axes))


def _call(
    state: RankState,
    weights: Leaves,
    microbatch: Any,
    method: Any,
    given: Tree,
    own: tuple[str, ...],
    *,
    now: bool = True,
    paths: Sequence[Any] = (),
    values: Values | None = None,
) -> tuple[Tree, Values]:
    """The result of a method of the ends, and the variables at some paths as it leaves them.

    Args:
      state: the rank's.
      weights: of embed and head.
      microbatch: its index.
      method: a function of the module of the ends and of ``given``.
      given: its argument.
      own: axes over which its random streams differ.
      now: whether declared state is read as it is, or else as the microbatch's forward read it.
      paths: of declared variables.
      values: of these before the call, if not those of the rank's state.
    """
    params = jax.tree.unflatten(jax.tree.structure(state.weights.ends), computed(state, weights))
    streams, fixed = state.ends_streams
    if state.held is not None:
        leaves = state.held.leaves(None, microbatch, now=now)
        whole = jax.tree.unflatten(jax.tree.structure(state.weights.ends_rest), leaves)
        fixed = split_streams(whole)[1]
    if values is not None:
        fixed = with_values(dict(nnx.to_flat_state(fixed)), paths, values)
    rest = nnx.merge_state(fold(streams, microbatch, state.axes, own), fixed)
    with batch_part_of(state.part_of(microbatch)) as asking:
        found, after = state.model.ends.update(method, params, rest, given, paths=paths)
    if asking.read_mask:
        state.mask_readers.add(_PART_OF.get(method.__name__, "embed"))
    return found, vary(after, state.axes)


# --- declared state ---


def ends_paths(state: RankState) -> list[Any]:
    """The paths of the ends' declared variables, in the order of their state."""
    return state_paths(state.ends_streams[1], state.model.ends.state)


def ends_values(state: RankState) -> Values:
    """The values of these variables before a step."""
    flat = dict(nnx.to_flat_state(state.ends_streams[1]))
    return [jax.tree.leaves(flat[path]) for path in ends_paths(state)]


def _writes(state: RankState) -> bool:
    """Tell whether embed, head or loss writes any of it."""
    return state.held is not None and state.held.writes_ends


def _paths(state: RankState, values: Values | None) -> list[Any]:
    return ends_paths(state) if values is not None or _writes(state) else []


def ends_usage(state: RankState, y: Tree, *, take_loss: bool) -> Usage:
    """Find how embed, head and loss use the state that they may write; ``y`` as of `metrics_of`."""
    values = ends_values(state)
    if not values:
        return (), ()
    inputs = at(state.batch.inputs, 0)
    written = read = [False] * len(jax.tree.leaves(values))

    def first(values: Values) -> tuple[Tree, Values]:
        outcome = embed(state, state.ends, inputs, 0, now=True, values=values)
        return outcome.value, outcome.state["embed"]

    def last(values: Values) -> tuple[Tree, Values]:
        given = state.ends, blank(y, state.axes), 0
        outcome = finish(state, *given, take_loss=take_loss, values=values)
        return (outcome.value, outcome.sums), outcome.state.get("finish", values)

    found = [usage_of(first, values)] if state.model.has_embed else []
    found.append(usage_of(last, values))
    for a, b in found:
        written = [x or y for x, y in zip(written, a, strict=True)]
        read = [x or y for x, y in zip(read, b, strict=True)]
    return tuple(written), tuple(read)


# --- shared with stages ---


def pure(state: RankState, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """A part of the model as a function of its arguments, with values in place of refs."""
    return without_refs(run) if state.has_refs else run


def computed(state: RankState, tree: Tree) -> Tree:
    """Parameters or activations in the dtype to compute in."""
    return as_computed(tree, state.model.compute_dtype)


def with_added(state: RankState, call: Callable[[], Outcome], *, adds: bool) -> Outcome:
    """The outcome of a call; in an evaluation with the sum of the losses that it adds."""
    if not (adds and state.counts):
        return call()

    def run(probe: jax.Array) -> Outcome:
        with adding_losses(dataclasses.replace(state.adding(), probe=probe)):
            return call()

    outcome, added = counted(run, state.adding().probe)
    return dataclasses.replace(cast("Outcome", outcome), added=[added])


def slice_of(state: RankState, unit: Any) -> Any:
    """The place of a unit in its sequence; () where sequences are whole."""
    if state.num_slices == 1:
        return ()
    if state.part is not None:
        return FixedSlice(state.part, state.num_slices, state.lengths)
    index = jnp.asarray(unit, jnp.int32) % state.num_slices
    return SequenceSlice(vary(index, state.axes), state.num_slices)


_PART_OF = {"headed": "head", "featured": "head", "lost": "loss_fn"}  # by method
CALL_SLICE = "call_slice"  # the method of stages and embed that know of slices


# Methods as functions with names, so that two calls can be seen to be the same.


def embedded(ends: Any, inputs: Tree) -> Tree:
    """The input of stage 0."""
    return ends.embed(inputs)


def embedded_slice(ends: Any, given: tuple[Tree, Any]) -> Tree:
    """The input of stage 0 for one slice.

    Raises:
      ValueError: embed leaves something for later slices.
    """
    inputs, part = given
    if not hasattr(ends.embed, CALL_SLICE):
        return ends.embed(inputs)
    y, own = ends.embed.call_slice(inputs, None, part)
    if jax.tree.leaves(own):
        raise ValueError(
            f"call_slice of embed returned a carry, {types_text(own)}: only stages keep values of "
            f"earlier slices; return (y, ()), and move what mixes positions into the first stage"
        )
    return y


def headed(ends: Any, y: Tree) -> Tree:
    """The result of the head on the last stage's output."""
    return ends.head(y)


def lost(ends: Any, given: tuple[Tree, Tree]) -> Any:
    """The result of a loss that is a module, on outputs and targets."""
    return ends.loss_fn(*given)


def featured(ends: Any, y: Tree) -> Tree:
    """The features of which a shared head makes its logits."""
    return ends.head.features(y)
