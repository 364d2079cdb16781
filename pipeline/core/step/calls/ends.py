"""Embed, head and loss of a rank as functions of their weights, for one microbatch.

Letters: M microbatches, b rows of a microbatch on one data shard. `embed` runs before the first
stage, `finish` after the last; both return an `Outcome`. Weights are arguments, so that a call can
be differentiated; everything else is read from the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from collectives import vary
from collectives.compat import without_refs
from pipeline.base.added import adding_losses, counted
from pipeline.base.precision import as_computed
from pipeline.base.rows import batch_part_of
from pipeline.base.tree import Leaves, Tree, at, blank, combine, partition, path_text
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.outcome import Outcome, outcome_and_pullback
from pipeline.core.model.loss import (
    LossFn,
    LossMetrics,
    LossModule,
    MicrobatchLoss,
    same_over_others,
    take_loss,
)
from pipeline.core.model.randomness import fold, own_axes, split_streams
from pipeline.core.step.calls.declared import Usage, Values, state_paths, usage_of, with_values
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import embedded_slice, slice_of

_SENT = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def embed(
    rank: Rank,
    weights: Leaves,
    inputs: Tree,
    microbatch: Any,
    *,
    now: bool = False,
    values: Values | None = None,
) -> Outcome:
    """Compute the input of stage 0.

    Args:
      inputs: [b, ...] leaves of the microbatch.
      now: whether this is the forward that writes declared state, and so reads current values.
      values: values of all declared variables before the call; by default the rank's values.
    """
    if not rank.model.has_embed:
        return Outcome(rank.varied(computed(rank, inputs)))
    # The forward that writes state returns it, and so does a trace with ``values``. A repetition in
    # a backward returns none, so XLA drops its computation of state.
    paths = ends_paths(rank) if values is not None or (now and _writes(rank)) else []

    method: Any = embedded
    argument = inputs
    if rank.slices.count > 1:
        method, argument = embedded_slice, (inputs, slice_of(rank, microbatch))

    def run(weights: Leaves) -> tuple[Tree, Values]:
        own = rank.facts.embed_axes
        y, after = _call(
            rank, weights, microbatch, method, argument, own, now=now, paths=paths, values=values
        )
        return checked("embed", y), after

    def call() -> Outcome:
        y, after = pure(rank, run)(weights)
        return Outcome(rank.varied(computed(rank, y)), state={"embed": after} if paths else {})

    return with_added(rank, call, adds=rank.facts.adding_embed)


def finish(
    rank: Rank,
    weights: Leaves,
    y: Tree,
    microbatch: Any,
    *,
    take_loss: bool = True,
    values: Values | None = None,
) -> Outcome:
    """Compute the sum of a microbatch's loss, a float32 scalar; or the outputs for the user.

    Args:
      y: the last stage's output.
      take_loss: whether the value is the loss. Then the outcome's sums are the loss, its weight,
        and the sums for metrics.
      values: values of all declared variables before the call; by default the rank's values.
    """

    def call() -> Outcome:
        if not take_loss:
            return _outputs(rank, weights, y, microbatch, values)
        run = pure(rank, lambda weights, y: _finish(rank, weights, y, microbatch, values)[0])
        outcome: Outcome = run(weights, y)
        return outcome

    return with_added(rank, call, adds=rank.facts.adding_ends)


def _outputs(
    rank: Rank, weights: Leaves, y: Tree, microbatch: Any, values: Values | None = None
) -> Outcome:
    if not rank.model.has_head:
        return Outcome(y)
    own, paths = own_axes(y, rank.axes), _paths(rank, values)
    with noted(rank, "head", y):
        value, after = _call(rank, weights, microbatch, headed, y, own, paths=paths, values=values)
        value = vary(checked("head", value, "its outputs"), rank.axes)
    return Outcome(value, state={"finish": after} if paths else {})


def _finish(
    rank: Rank, weights: Leaves, y: Tree, microbatch: Any, values: Values | None = None
) -> tuple[Outcome, LossMetrics | None]:
    """Call head and loss; return the outcome, and the function from sums to metrics."""
    outputs = _outputs(rank, weights, y, microbatch, values)
    written = dict(outputs.state)
    # The loss may be a module that reads or writes state too: it reads the values that the head has
    # returned.
    before = written.get("finish", values)
    taken, after = take_loss_of(rank, weights, outputs.value, microbatch, values=before)
    if after is not None:
        written = {"finish": after}
    # The weight is counted without a gradient. `taken.weight - weight` is 0 and has the weight's
    # gradient, from which the value gets the second term of d(S / W).
    weight = jax.lax.stop_gradient(taken.weight)
    value = _over_weight(rank, taken.total, taken.weight - weight)
    sums = {"loss": [taken.total], "weight": [weight], "metrics": taken.sums}
    # Ranks of `tensor` share one loss, so their values must be equal.
    value, sums = same_over_others("loss_fn", vary((value, sums), rank.axes), rank.axes)
    return Outcome(value, state=written, sums=sums), taken.metrics


def take_loss_of(
    rank: Rank,
    weights: Leaves,
    outputs: Tree,
    microbatch: Any,
    *,
    targets: Tree = None,
    values: Values | None = None,
) -> tuple[MicrobatchLoss, Values | None]:
    """Compute one microbatch's loss, and the declared state after the loss, if any.

    By default ``targets`` are the targets of the microbatch.
    """
    after: Values | None = None
    targets = at(rank.batch.targets, microbatch) if targets is None else targets

    def of_module(outputs: Tree, targets: Tree) -> Any:
        nonlocal after
        own, paths = own_axes(outputs, rank.axes), _paths(rank, values)
        pair = outputs, targets
        loss, left = _call(rank, weights, microbatch, lost, pair, own, paths=paths, values=values)
        after = left if paths else None
        return loss

    is_module = isinstance(rank.model.loss_fn, LossModule)
    loss_fn = of_module if is_module else cast("LossFn", rank.model.loss_fn)
    with rank.with_ranks(), noted(rank, "loss_fn", (outputs, targets)):
        options: dict[str, Any] = {"has_aux": rank.model.has_aux, "share": rank.slices.share}
        taken = take_loss(loss_fn, outputs, targets, **options)
    return taken, after


def _over_weight(rank: Rank, total: jax.Array, change: jax.Array) -> jax.Array:
    """Return the sum S of a microbatch, with the gradient dS - mean * dW if W has a gradient.

    Args:
      rank: the rank; its scale has the mean of the step if W has a gradient.
      total: S of the microbatch.
      change: a zero that has the gradient of the weight W.
    """
    if rank.loss.mean is None:
        return total
    return total - vary(rank.loss.mean, rank.axes) * change


def metrics_of(rank: Rank, y: Tree) -> tuple[Leaves, LossMetrics | None]:
    """Trace the metrics: return the types of their sums, and the function from sums to metrics.

    Args:
      y: types of the last stage's output.
    """
    if not rank.model.has_aux:
        return [], None
    kinds = list[LossMetrics | None]()

    def measured() -> Leaves:
        outcome, metrics = _finish(rank, rank.ends, blank(y, rank.axes), 0)
        kinds.append(metrics)
        return outcome.sums["metrics"]

    return jax.eval_shape(measured), kinds[0]


def features(rank: Rank, weights: Leaves, y: Tree, microbatch: Any) -> jax.Array:
    """Compute the features from which a head that all ranks share makes its logits."""
    own = own_axes(y, rank.axes)

    def run(weights: Leaves, y: Tree) -> Tree:
        return _call(rank, weights, microbatch, featured, y, own)[0]

    return cast("jax.Array", vary(pure(rank, run)(weights, y), rank.axes))


def _call(
    rank: Rank,
    weights: Leaves,
    microbatch: Any,
    method: Any,
    argument: Tree,
    own: tuple[str, ...],
    *,
    now: bool = True,
    paths: Sequence[Any] = (),
    values: Values | None = None,
) -> tuple[Tree, Values]:
    """Call a method of the ends; return its result, and the variables at ``paths`` after the call.

    Args:
      method: a function of the module of the ends and of ``argument``.
      own: further axes on which each rank has its own random keys.
      now: whether to read the current declared state; else the values that the forward read.
      values: values of the variables at ``paths`` before the call; by default the rank's values.
    """
    # Collect all state besides parameters for this microbatch: the declared state that it must
    # read, and random keys that do not depend on the order of calls.
    params = jax.tree.unflatten(jax.tree.structure(rank.weights.ends), computed(rank, weights))
    streams, fixed = rank.ends_streams
    if rank.declared is not None:
        leaves = rank.declared.leaves(None, microbatch, now=now)
        whole = jax.tree.unflatten(jax.tree.structure(rank.weights.ends_rest), leaves)
        fixed = split_streams(whole)[1]
    if values is not None:
        fixed = with_values(dict(nnx.to_flat_state(fixed)), paths, values)
    rest = nnx.merge_state(fold(streams, microbatch, rank.axes, own), fixed)
    with rank.with_ranks(), batch_part_of(rank.part_of(microbatch)) as asking:
        result, after = rank.model.ends.update(method, params, rest, argument, paths=paths)
    # For `pipeline.lint`: a part that reads the mask handles padding itself.
    if asking.read_mask:
        rank.facts.mask_readers.add(_PART_OF.get(method.__name__, "embed"))
    return result, vary(after, rank.axes)


# --- pullbacks ---


def embed_pullback(rank: Rank, microbatch: Any) -> tuple[Outcome, Pullback]:
    """Call embed; return its outcome, and its pullback for the ends' weights and the inputs."""
    inputs = at(rank.batch.inputs, microbatch)
    call = lambda weights, inputs: embed(rank, weights, inputs, microbatch)  # noqa: E731
    return _pullback(rank, call, inputs, "embed")


def loss_pullback(rank: Rank, y: Tree, microbatch: Any) -> tuple[Outcome, Pullback]:
    """Call `finish`; return its outcome, and its pullback for the ends' weights and ``y``."""
    call = lambda weights, y: finish(rank, weights, y, microbatch)  # noqa: E731
    return _pullback(rank, call, y, "head, or loss_fn," if rank.model.has_head else "loss_fn")


def _pullback(
    rank: Rank, call: Callable[[Leaves, Tree], Outcome], x: Tree, part: str
) -> tuple[Outcome, Pullback]:
    floats, others = partition(x)
    return outcome_and_pullback(
        lambda weights, leaves: call(weights, combine(x, leaves, others)),
        rank.ends,
        floats,
        grad_dtype=rank.model.grad_dtype,
        trained=rank.model.trained.ends,
        adding=rank.adding if rank.facts.adding_ends else None,
        part=part,
    )


# --- declared state ---


def ends_paths(rank: Rank) -> list[Any]:
    """List the paths of the ends' declared variables, in the order of the ends' state."""
    return state_paths(rank.ends_streams[1], rank.model.ends.state)


def ends_values(rank: Rank) -> Values:
    flat = dict(nnx.to_flat_state(rank.ends_streams[1]))
    return [jax.tree.leaves(flat[path]) for path in ends_paths(rank)]


def _writes(rank: Rank) -> bool:
    return rank.declared is not None and rank.declared.writes_ends


def _paths(rank: Rank, values: Values | None) -> list[Any]:
    return ends_paths(rank) if values is not None or _writes(rank) else []


def ends_usage(rank: Rank, y: Tree, *, take_loss: bool) -> Usage:
    """Find how embed, head and loss use declared state; ``y``: types of the last stage's output."""
    values = ends_values(rank)
    if not values:
        return (), ()
    inputs = at(rank.batch.inputs, 0)
    written = read = [False] * len(jax.tree.leaves(values))

    def first(values: Values) -> tuple[Tree, Values]:
        outcome = embed(rank, rank.ends, inputs, 0, now=True, values=values)
        return outcome.value, outcome.state["embed"]

    def last(values: Values) -> tuple[Tree, Values]:
        arguments = rank.ends, blank(y, rank.axes), 0
        outcome = finish(rank, *arguments, take_loss=take_loss, values=values)
        return (outcome.value, outcome.sums), outcome.state.get("finish", values)

    usages = [usage_of(first, values)] if rank.model.has_embed else []
    usages.append(usage_of(last, values))
    for a, b in usages:
        written = [x or y for x, y in zip(written, a, strict=True)]
        read = [x or y for x, y in zip(read, b, strict=True)]
    return tuple(written), tuple(read)


# --- shared with stages ---


def pure(rank: Rank, run: Callable[..., Tree]) -> Callable[..., Tree]:
    """Make ``run`` a pure function, with values in place of refs, if the model makes refs."""
    return without_refs(run) if rank.facts.has_refs else run


def computed(rank: Rank, tree: Tree) -> Tree:
    """Cast parameters or activations to the model's compute dtype."""
    return as_computed(tree, rank.model.compute_dtype)


def with_added(rank: Rank, call: Callable[[], Outcome], *, adds: bool) -> Outcome:
    """Return the outcome of a call; in an evaluation also the sum of its added losses."""
    # In training the pullback of the call returns this sum (`Outcome.added`).
    if not (adds and rank.loss.counts):
        return call()

    def run(probe: jax.Array) -> Outcome:
        with adding_losses(dataclasses.replace(rank.adding(), probe=probe)):
            return call()

    outcome, added = counted(run, rank.adding().probe)
    return dataclasses.replace(cast("Outcome", outcome), added=[added])


_PART_OF = {"headed": "head", "featured": "head", "lost": "loss_fn"}  # by method


# Methods as named functions, so that two calls of one method have equal keys.


def embedded(ends: Any, inputs: Tree) -> Tree:
    return ends.embed(inputs)


def headed(ends: Any, y: Tree) -> Tree:
    return ends.head(y)


def lost(ends: Any, pair: tuple[Tree, Tree]) -> Any:
    return ends.loss_fn(*pair)


def featured(ends: Any, y: Tree) -> Tree:
    return ends.head.features(y)


@contextlib.contextmanager
def noted(rank: Rank, part: str, argument: Tree) -> Iterator[None]:
    """Add a note to an exception in this context: the part of the model, and its argument.

    Args:
      part: embed, head or loss_fn.
      argument: the argument, or its types; for a loss a pair (outputs, targets).
    """
    try:
        yield
    except Exception as error:
        rank.lint.explain_part(rank, part, argument, error)
        raise


def checked(part: str, y: Tree, what: str = "its activation") -> Tree:
    """Return the value of a part; raise ValueError if a leaf is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(y):
        if not isinstance(leaf, _SENT):
            raise ValueError(
                f"{part} returned {leaf!r} as {path_text(path)} of {what}; what passes between "
                f"stages, and to the loss, is arrays and numbers: give what says how to compute to "
                f"the constructors of the stages"
            )
    return y
