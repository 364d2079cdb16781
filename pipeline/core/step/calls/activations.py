"""Activations between neighbours: each stage takes the output of the previous stage.

Letters: K stages. Activation k, 0 <= k <= K, is the input of stage k; activation K is the last
stage's output. The user declares no types: a trace of one stage after the other finds them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from collectives.compat import has_check
from pipeline.base.added import Adding, adding_losses
from pipeline.base.tree import Tree, at, blank, join, signature
from pipeline.core.autodiff.jaxpr.primitives import makes_ref
from pipeline.core.autodiff.outcome import Outcome, SlicedInput
from pipeline.core.model.ends import check_activations, check_words
from pipeline.core.model.randomness import own_axes
from pipeline.core.step.calls.ends import embed, noted
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.calls.slices import blank_input


@dataclass(frozen=True, eq=False)
class Activations:
    """Types of activations, from a trace of one stage after the other.

    Attributes:
      types: the types of activations 0..K.
      bodies: [K] the jaxpr of each stage as a function of its weights. Stages that are one
        computation share a jaxpr.
      adding: [K] records of the losses that stages add.
      sums: by name, the types of the sums of a stage's outcome.
      carries: [K] the types of the carry from a slice to later slices; () without slices.
      by_slice: [N] the activations of each slice, if slices differ in length; else empty.
    """

    types: list[Tree]
    bodies: list[Any]
    adding: tuple[Adding, ...]
    sums: dict[str, list[Any]]
    carries: tuple[Tree, ...]
    by_slice: tuple[Activations, ...] = ()


def follow(rank: Rank) -> tuple[Rank, Activations]:
    """Trace the activations of a model; add the facts that the trace shows to the rank.

    Activations that differ only in the axes over which they vary are widened to one type. So equal
    stages share their code even if the first stage splits activations over ``tensor`` and the
    others take and return parts.

    Raises:
      ValueError: a stage does not accept the output of the previous stage; or activations do not
        fit embed and head that all ranks share.
    """
    # All traces use microbatch 0, since all microbatches have equal types.
    model, inputs = rank.model, at(rank.batch.inputs, 0)
    if model.tables.embed >= 0:
        check_words(inputs)

    def first(rank: Rank) -> Tree:
        with noted(rank, "embed", inputs):
            return embed(rank, rank.ends, inputs, 0).value

    # Embed's random keys must differ between ranks that have different parts of its output. The
    # type of the output shows the axes, so a first trace finds them for all later traces.
    if model.has_embed and jax.tree.leaves(rank.ends_streams[0]):
        axes = own_axes(jax.eval_shape(functools.partial(first, rank)), rank.axes)
        rank = rank.with_facts(embed_axes=axes)
    while True:
        # A wider input may widen the output of a stage, so trace again until the joined type is
        # stable. This ends, because axes are only added. JAX caches traces by function, so each
        # trial needs a new function.
        activations = _follow(rank, jax.eval_shape(functools.partial(first, rank)))
        joined = join(activations.types)
        if joined is None or all(signature(x) == signature(joined) for x in activations.types):
            break
        if rank.facts.widest is not None and signature(rank.facts.widest) == signature(joined):
            break
        rank = rank.with_facts(widest=joined)
    rank.lint.stages(rank, activations)
    if model.tables.is_used:
        check_activations(activations.types)
    rank = rank.with_facts(
        has_checks=rank.facts.has_checks or any(has_check(b.effects) for b in activations.bodies),
        has_refs=rank.facts.has_refs or any(makes_ref(body) for body in activations.bodies),
        adding_stages=tuple(adding.is_used for adding in activations.adding),
        stage_sums=activations.sums,
    )
    # Each slice has activations of its length, and reads carries padded to the longest slice.
    if rank.slices.lengths:
        of = tuple(
            activations if each is rank else _follow(each, _first_type(each), activations.carries)
            for each in rank.by_slice
        )
        activations = dataclasses.replace(activations, by_slice=of)
    return rank, activations


def _first_type(rank: Rank) -> Tree:
    inputs = at(rank.batch.inputs, 0)
    return jax.eval_shape(lambda: embed(rank, rank.ends, inputs, 0).value)


def _follow(rank: Rank, x: Tree, earlier: Sequence[Tree] | None = None) -> Activations:
    """Trace activations 1..K from the type of activation 0.

    Args:
      earlier: [K] types of the carries of the longest slice, if the activations are of another
        slice.
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
    """Trace stage k: return the types of its outcome, its jaxpr, and a record of added losses."""
    stage = StageKind(rank, (k,))

    def run(x: Tree) -> tuple[Outcome, Any]:
        weights, fixed, side = stage.example()
        # A stage reads carries that its own calls return: a call without carries gives their types.
        carry: Tree = ()
        if earlier is not None:
            carry = earlier
        elif rank.slices.count > 1:
            first = lambda: stage.stage(  # noqa: E731
                weights, fixed, side, SlicedInput(blank(x, ()), None)
            )
            carry = jax.eval_shape(first).carry
        # The input is made within the trace: some releases of JAX accept no argument types with
        # varying axes.
        call = lambda weights: stage.stage(  # noqa: E731
            weights, fixed, side, blank_input(rank, x, carry, ())
        )
        closed, outcome = jax.make_jaxpr(call, return_shape=True)(weights)
        return outcome, closed.jaxpr

    try:
        with adding_losses(Adding()) as adding:
            outcome, body = run(before[k])
    except Exception as error:
        rank.lint.explain_stage(rank, k, before, run, error)
        raise
    return outcome, body, adding
