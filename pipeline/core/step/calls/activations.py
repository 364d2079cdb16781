"""Activations between neighbours: each stage takes the output of the one before it.

Letters: K stages. Activation k, 0 <= k <= K, is the input of stage k; activation K is the last
stage's output. Nobody declares their types: they follow from tracing one stage after the other.
So a stage that cannot take what it is given fails somewhere inside, and what it does take is
found by trial: the types of other boundaries, then changes of one leaf towards its weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collectives.compat import has_check
from pipeline.base.added import Adding, adding_losses
from pipeline.base.rows import BatchPart
from pipeline.base.stacks import REMEDY
from pipeline.base.tree import Tree, at, blank, join, path_text, shape_text, signature
from pipeline.core.autodiff.jaxpr.primitives import makes_ref
from pipeline.core.autodiff.outcome import Outcome, SlicedInput
from pipeline.core.model.ends import check_activations, check_words
from pipeline.core.model.model import Batch
from pipeline.core.model.randomness import own_axes
from pipeline.core.step.calls.ends import embed
from pipeline.core.step.calls.forward import Forward
from pipeline.core.step.calls.messages import (
    check_constraint_error,
    check_constraints,
    check_order,
    check_static,
    noted,
    types_text,
)
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError)
_MOST_TRIALS = 200


@dataclass(frozen=True, eq=False)
class Activations:
    """Types of activations, from a trace of one stage after the other.

    Attributes:
      types: of activations 0..K.
      bodies: [K] of each stage, its jaxpr as a function of its weights; stages that are one
        computation share theirs.
      adding: [K] records of the losses that stages add.
      sums: by name, the types of the sums of a stage's outcome.
      carries: [K] types of what a slice leaves for later ones; () without slices.
      by_slice: [N] the activations of each slice, if they have lengths of their own; else empty.
    """

    types: list[Tree]
    bodies: list[Any]
    adding: tuple[Adding, ...]
    sums: dict[str, list[Any]]
    carries: tuple[Tree, ...]
    by_slice: tuple[Activations, ...] = ()


def follow(rank: Rank) -> tuple[Rank, Activations]:
    """The activations of a model, and the state with what they say of the axes that vary.

    Where activations differ in the axes they vary over, they are widened to one type. So stages
    that are alike stay so, if one of them starts what the others go on with (activations of which
    each rank of ``tensor`` has its part).

    Raises:
      ValueError: a stage does not take what the one before it returns; or activations do not fit
        what all ranks do with them.
    """
    model, inputs = rank.model, at(rank.batch.inputs, 0)
    if model.tables.embed >= 0:
        check_words(inputs)

    def first(rank: Rank) -> Tree:
        with noted("embed", inputs, rank.batch.extras):
            return embed(rank, rank.ends, inputs, 0).value

    if model.has_embed and jax.tree.leaves(rank.ends_streams[0]):
        own = own_axes(jax.eval_shape(functools.partial(first, rank)), rank.axes)
        rank = rank.with_facts(embed_axes=own)
    while True:
        # Caches go by function, so each trial has one of its own.
        activations = _follow(rank, jax.eval_shape(functools.partial(first, rank)))
        joined = join(activations.types)
        if joined is None or all(signature(x) == signature(joined) for x in activations.types):
            break
        if rank.facts.widest is not None and signature(rank.facts.widest) == signature(joined):
            break
        rank = rank.with_facts(widest=joined)
    if model.stack > 1:
        _check_that_it_is_a_stack(rank, activations.types)
    if model.tables.is_used:
        check_activations(activations.types)
    rank = rank.with_facts(
        has_checks=rank.facts.has_checks or any(has_check(b.effects) for b in activations.bodies),
        has_refs=rank.facts.has_refs or any(makes_ref(body) for body in activations.bodies),
        adding_stages=tuple(adding.is_used for adding in activations.adding),
        stage_sums=activations.sums,
    )
    if rank.slices.lengths:
        of = tuple(
            activations if each is rank else _follow(each, _first_type(each), activations.carries)
            for each in rank.by_slice
        )
        activations = dataclasses.replace(activations, by_slice=of)
    return rank, activations


def _first_type(rank: Rank) -> Tree:
    """The type of activation 0."""
    inputs = at(rank.batch.inputs, 0)
    return jax.eval_shape(lambda: embed(rank, rank.ends, inputs, 0).value)


def _follow(rank: Rank, x: Tree, earlier: Sequence[Tree] | None = None) -> Activations:
    """Activations 1..K, and 0, whose type is given.

    Args:
      rank: the rank's.
      x: the type of activation 0.
      earlier: [K] types of the carries of the longest slice, if this is another.
    """
    types, bodies, adding, outcomes = [x], [], [], {}
    sums: dict[str, list[Any]] = {}
    carries = []
    for k, position in enumerate(rank.model.stages):
        key = rank.code(position), signature(x)
        if key not in outcomes:
            outcomes[key] = _output(rank, k, types, earlier and earlier[k])
        outcome, body, adds = outcomes[key]
        x = outcome.value
        sums |= outcome.sums
        bodies.append(body)
        adding.append(adds)
        carries.append(outcome.carry)
        types.append(x)
    return Activations(types, bodies, tuple(adding), sums, tuple(carries))


def _output(
    rank: Rank, k: int, before: list[Tree], earlier: Tree = None
) -> tuple[Outcome, Any, Adding]:
    """The types of stage k's outcome, the jaxpr of the stage, and a record of its losses."""
    stage = Forward(rank, rank.model.stages[k])

    def run(x: Tree) -> tuple[Outcome, Any]:
        weights, fixed, side = stage.stage_arguments(stage.home, 0)
        own: Tree = ()
        if earlier is not None:
            own = earlier
        elif rank.slices.count > 1:
            first = lambda: stage.stage(  # noqa: E731
                weights, fixed, side, SlicedInput(blank(x, ()), None)
            )
            own = jax.eval_shape(first).carry
        # Made inside: not every release takes a type that says over which axes it varies.
        call = lambda weights: stage.stage(  # noqa: E731
            weights, fixed, side, blank_input(rank, x, own, ())
        )
        closed, outcome = jax.make_jaxpr(call, return_shape=True)(weights)
        return outcome, closed.jaxpr

    try:
        with adding_losses(Adding()) as adding:
            outcome, body = run(before[k])
    except Exception as error:
        check_static(f"stages[{k}]", before[k], error)
        check_constraint_error(f"stages[{k}]", error)
        if rank.model.stack > 1 and isinstance(error, TypeError | ValueError):
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"stages[{k}] cannot run on {types_text(before[k])} ({first}); stages is one "
                f"module whose arrays all have a leading axis of {rank.model.stack}: {REMEDY}"
            ) from error
        _note_what_is_tracked(error, rank.axes)
        taken = None
        if k > 0 and isinstance(error, _REFUSALS):
            weights = jax.eval_shape(lambda: stage.weights[stage.home])
            taken = _taken(run, [*before[k - 1 :: -1], *_changes(before[k], weights)])
        if taken is None:
            source = f"what stages[{k - 1}] returns: " if k else ""
            error.add_note(f"stages[{k}] was given {source}{types_text(before[k])}")
            raise
        raise ValueError(
            f"stages[{k}] takes {_difference(taken, before[k], f'stages[{k - 1}]')} (per "
            f"microbatch and data shard); neighbours agree on the activation between them: change "
            f"either stage"
        ) from error
    check_order(f"stages[{k}]", body.effects)
    check_constraints(f"stages[{k}]", body)
    return outcome, body, adding


def _check_that_it_is_a_stack(rank: Rank, types: list[Tree]) -> None:
    """Check that stages given as one module are not one stage.

    Raises:
      ValueError: with whole arrays in place of their rows it computes a stage's output too, of rows
        that are no multiple of K.
    """
    K = rank.model.stack
    stage, rows = Forward(rank, rank.model.stages[0]), 2 * K + 1

    def whole(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jnp.broadcast_to(leaf, (K, *leaf.shape))

    def resized(leaf: Any) -> Any:
        return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)

    def run() -> Tree:
        weights, fixed, (streams, extras, part, _, *where) = stage.stage_arguments(stage.home, 0)
        batch = Batch((), (), extras, rank.batch.specs and ((), (), rank.batch.specs[2]))
        extras = batch.map_rows(resized, lambda leaf: leaf).extras
        side = streams, extras, part, BatchPart(), *where
        x = jax.tree.map(resized, blank(types[0], ()))
        weights, fixed = list(map(whole, weights)), jax.tree.map(whole, fixed)
        return stage.stage(weights, fixed, side, x).value

    try:
        with jax.numpy_rank_promotion("allow"):
            outputs = jax.eval_shape(run)
    except Exception:  # noqa: BLE001  as it should be
        return
    if [y.shape for y in jax.tree.leaves(outputs)] == [
        (rows, *y.shape[1:]) for y in jax.tree.leaves(types[1])
    ]:
        raise ValueError(
            f"stages is one module whose arrays all have a leading axis of {K}; it is taken for "
            f"{K} stages, and computes the same shapes as one stage: {REMEDY}"
        )


def _note_what_is_tracked(error: Exception, varying: tuple[str, ...]) -> None:
    """Tell whoever reads an error that values have types here which they lack under `jax.jit`."""
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    axes = sorted(manual - {*varying})
    if axes:
        error.add_note(
            f"the mesh has the axis {' and '.join(map(repr, axes))}, so a stage runs as under "
            f"jax.shard_map(check_vma=True): where fresh arrays meet values that vary over mesh "
            f"axes (the carry of a loop, a branch, a Pallas kernel), wrap what holds no collective "
            f"in collectives.local, or mark the fresh array with collectives.vary; a weight whose "
            f"metadata or sharding= names the axis is here its rank's part: if the layers know "
            f"nothing of that, leave the axis to the compiler by auto_axes={tuple(axes)!r}"
        )


def _taken(run: Callable[[Tree], Any], candidates: list[Tree]) -> Tree | None:
    """The first candidate that a stage can run on."""
    for x in candidates[:_MOST_TRIALS]:
        try:
            run(x)
        except _REFUSALS:
            continue
        return x
    return None


def _changes(x: Tree, weights: list[Any]) -> Iterator[Tree]:
    """Activations that differ from ``x`` in the dtype or in one size of one leaf."""
    leaves, treedef = jax.tree.flatten(x)
    sizes = sorted({size for w in weights for size in w.shape})
    dtypes = list(dict.fromkeys([*(w.dtype for w in weights), jnp.dtype("int32")]))
    for n, leaf in enumerate(leaves):
        changed = [(leaf.shape, dtype) for dtype in dtypes]
        for axis in reversed(range(1, leaf.ndim)):
            changed += [
                ((*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]), leaf.dtype) for size in sizes
            ]
        for shape, dtype in changed:
            if (shape, dtype) != (leaf.shape, leaf.dtype):
                new = leaf.update(shape=shape, dtype=dtype)
                yield jax.tree.unflatten(treedef, [*leaves[:n], new, *leaves[n + 1 :]])


def _difference(taken: Tree, returned: Tree, neighbour: str) -> str:
    """``float32[2,8] as the array of its activation, but stages[0] returns float32[2,4]``."""
    structures: list[Any] = [jax.tree.structure(taken), jax.tree.structure(returned)]
    if structures[0] != structures[1]:
        return (
            f"an activation of structure {structures[0]}, but {neighbour} returns {structures[1]}"
        )
    pairs = jax.tree_util.tree_leaves_with_path(taken)
    for (path, a), b in zip(pairs, jax.tree.leaves(returned), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return (
                f"{shape_text(a)} as {path_text(path)} of its activation, but {neighbour} returns "
                f"{shape_text(b)}"
            )
    return "another activation"
