"""A step is opened once: a rank's arrays, a trace of its model, and what is computed once a step.

`open_step` serves training, evaluation, outputs and log-probabilities, and both engines. The engine
"scan" opens a step before its first tick. The engine "programs" opens it in a first trace, whose
facts are `known` to the trace of each program, and in `begin`, which computes what later programs
receive.

Parts of the model are traced on the types of one microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pipeline.base.added import Adding, adding_losses
from pipeline.base.masks import Needs, NeedsGradient
from pipeline.base.tree import Leaves, at, blank, real
from pipeline.core.autodiff.jaxpr.narrow import is_narrower, read_in
from pipeline.core.autodiff.jaxpr.primitives import makes_ref
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls import ends
from pipeline.core.step.calls.activations import follow
from pipeline.core.step.calls.declared import DeclaredState
from pipeline.core.step.calls.opened import Once, OpenedStep, RunForwards, StepInputs
from pipeline.core.step.calls.rank import LossScale, Rank, StepRequest
from pipeline.core.step.ranks import make_rank
from pipeline.core.step.results import calls_of
from pipeline.core.step.share import find_share


def open_step(
    plan: Plan,
    model: Model,
    request: StepRequest,
    weights: Weights,
    batch: Batch,
    inputs: StepInputs,
    *,
    run_forwards: RunForwards,
    known: OpenedStep | None = None,
    once: Once | None = None,
) -> OpenedStep:
    """Open a step on a rank's arrays, within the shard_map.

    With ``known``, the facts of an earlier trace, no part of the model is traced or checked again.
    With ``once``, nothing is computed that an earlier program has computed.
    ``run_forwards`` computes share and mean of a loss that depend on outputs, by running all
    forward actions once.

    Raises:
      ValueError: a model that the checks of `pipeline.lint` refuse; losses that are added by a head
        that all ranks share, or by an embed without a gradient; or as `find_share`.
    """
    earlier: Any = {} if once is None else {"counts": once.counts, "made": once.weights}
    rank = make_rank(plan, model, weights, batch, **earlier)
    if known is None:
        rank = dataclasses.replace(rank, loss=_first_factors(plan, request, inputs))
        step = _inspect(plan, request, rank)
        if not (request.take_loss or request.logprobs):
            plan.lint.outputs(step)
        plan.lint.whole(step)
    else:
        first = _first_factors(plan, request, inputs) if once is None else known.rank.loss
        loss = dataclasses.replace(first, is_mean=known.rank.loss.is_mean)
        rank = dataclasses.replace(rank, facts=known.rank.facts, loss=loss)
        step = _prepared(known, rank, None if once is None else once.weights)
    if once is not None:
        step = step.with_rank(loss=dataclasses.replace(step.rank.loss, **once.factors))
    elif request.training:
        step = step.with_rank(loss=find_share(step, run_forwards))
    return step.with_rank(declared=_declared_state(step))


def _first_factors(plan: Plan, request: StepRequest, inputs: StepInputs) -> LossScale:
    """Compute the factors of a loss that do not depend on the total weight of the losses."""
    if not request.training:
        return LossScale(counts=request.take_loss)
    scale = inputs.scale
    of_caller, of_added = scale if isinstance(scale, tuple) else (scale, scale)
    added = 1 if of_added is None else of_added.astype(real())
    return LossScale(of_caller=of_caller, of_added=added / calls_of(plan))


def find_needs(plan: Plan, model: Model, request: StepRequest) -> Needs:
    """Find [K] the gradients that each stage's backward computes."""
    if not request.training:
        masks = [(False,) * len(mask) for mask in model.trained.stages]
        return tuple(NeedsGradient(mask, x=False) for mask in masks)
    needs = model.trained.needs_gradients(want_inputs=request.want_inputs)
    if plan.schedule.num_slices > 1:
        # One pullback returns gradients of carries and of the input.
        needs = tuple(dataclasses.replace(need, x=True) for need in needs)
    return needs


def _inspect(plan: Plan, request: StepRequest, rank: Rank) -> OpenedStep:
    # Each trace needs the facts of the earlier ones: types of activations, then the casts in the
    # bodies of stages, then head and loss on the last activation, then state.
    rank, activations = follow(rank)
    plan.lint.parts(plan, rank, activations, take_loss=request.take_loss)
    needs = find_needs(plan, rank.model, request)
    step = _prepared(OpenedStep(plan, request, rank, needs, activations), rank)
    if request.take_loss:
        step = _with_ends(step)
    else:
        plan.lint.ends(rank, activations)
    return _with_usage(step) if rank.model.declared.is_anything else step


def _prepared(step: OpenedStep, rank: Rank, made: dict[str, Leaves] | None = None) -> OpenedStep:
    """Add what all actions share to the rank: weights made once a step, and the cut batch."""
    dtypes = narrow_dtypes(rank, step.activations.bodies) if made is None else None
    gathers = step.plan.gather == "step" or step.plan.gathers_by_program
    chunks = rank.chunks.make_ready(gathers=gathers, dtypes=dtypes, made=made)
    rank = dataclasses.replace(rank, chunks=chunks)
    # The batch is cut once here; otherwise each model of the rank would cut it again.
    rank = dataclasses.replace(rank, batches=tuple(one.batch for one in rank.by_slice))
    return dataclasses.replace(step, rank=rank)


def narrow_dtypes(rank: Rank, bodies: Sequence[Any]) -> list[list[Any]] | None:
    """Return [V] for each leaf of a chunk the narrower dtype to which all stages cast it, or None.

    A stage with float32 weights that computes in bfloat16 casts them in every action; with the
    dtype from here they are cast once a step. ``bodies`` has [K] the jaxpr of each stage as a
    function of its weights. The result is None if all entries are None, and for a model with refs
    or with checks of checkify.
    """
    if rank.facts.has_refs or rank.facts.has_checks:
        return None
    # All stages of a chunk read its leaves, and a shared cell may hold different weights of them.
    # A leaf is narrow only if all stages cast it to one dtype.
    found: list[list[set[Any]]] = [[set() for _ in leaves] for leaves in rank.chunks.shards]
    reads = {key: read_in(body) for key, body in {id(body): body for body in bodies}.items()}
    for position, body in zip(rank.model.stages, bodies, strict=True):
        cells = position.views.params.cells(len(found[position.chunk]))
        for cell, dtypes in zip(cells, reads[id(body)], strict=True):
            found[position.chunk][cell] |= dtypes

    def narrow(dtypes: set[Any], leaf: Any) -> Any:
        dtype = next(iter(dtypes), None) if len(dtypes) == 1 else None
        return dtype if dtype is not None and is_narrower(dtype, leaf.dtype) else None

    pairs = zip(found, rank.chunks.shards, strict=True)
    of_chunks = [list(map(narrow, *of)) for of in pairs]
    return of_chunks if any(dtype is not None for of in of_chunks for dtype in of) else None


def _with_ends(step: OpenedStep) -> OpenedStep:
    """Trace embed, head and loss, to find whether the loss is a mean and which losses are added."""
    is_mean, body, of_embed, of_head = _trace_ends(step)
    if of_head.is_used and "head" in step.plan.shared:
        raise ValueError(
            "the head calls add_loss, and all ranks share it (vocabulary='stage'), so that no one "
            "of them runs it; add the loss in the last stage, or use vocabulary='ends'"
        )
    reaches = step.request.want_inputs or step.rank.model.trained.embed
    if of_embed.is_used and step.request.training and not reaches:
        raise ValueError(
            "embed calls add_loss, and wrt= trains nothing in it, so that no gradient goes back to "
            "it; train embed too, or let it add nothing"
        )
    # Facts change how a part is called: refs become values, and a call that adds losses returns
    # their sum. So the rank gets the facts before it makes the functions that run.
    rank = step.rank.with_facts(
        has_refs=step.rank.facts.has_refs or makes_ref(body),
        adding_ends=of_embed.is_used or of_head.is_used,
        adding_embed=of_embed.is_used,
    )
    rank = dataclasses.replace(rank, loss=dataclasses.replace(rank.loss, is_mean=is_mean))
    adding = {"embed": of_embed, "the head": of_head}
    return dataclasses.replace(step, rank=rank, ends_body=body, adding=adding)


def _trace_ends(step: OpenedStep) -> tuple[bool, Any, Adding, Adding]:
    """Tell whether every microbatch's loss is a mean; return also what the trace shows of the ends.

    That is the jaxpr of embed, head and loss as a function of their weights, and a record of added
    losses for embed, and one for the head.

    Raises:
      ValueError: loss_fn calls `add_loss`.
    """
    # One trace of all parts: the jaxpr shows which weights are read, and records show the parts
    # that call `add_loss`. Embed and head have separate records, because their added losses are
    # treated differently.
    rank, results = step.rank, list[Any]()

    def probe(weights: Leaves) -> Any:
        y = blank(step.activations.types[-1], rank.axes)
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
            embedded = ends.embed(rank, weights, at(rank.batch.inputs, 0), 0).value
        results.extend([taken.is_mean, of_embed, of_head])
        return embedded, taken.total, taken.weight

    body = jax.make_jaxpr(probe)(rank.ends).jaxpr
    is_mean, of_embed, of_head = results
    return is_mean, body, of_embed, of_head


def _with_usage(step: OpenedStep) -> OpenedStep:
    """Trace which declared state each part writes, and which state affects its results."""
    # The use of state decides which values the step keeps. One trace serves a kind of stage.
    usage = [(kind.stages, kind, kind.usage()) for kind in step.kinds]
    y = step.activations.types[-1]
    of_ends = ends.ends_usage(step.rank, y, take_loss=step.request.take_loss)
    return dataclasses.replace(step, usage=usage, usage_of_ends=of_ends)


def _declared_state(step: OpenedStep) -> DeclaredState | None:
    """Make the storage of declared state; None if the step writes no state."""
    if step.usage_of_ends is None or not step.writes_state:
        return None
    model, plan = step.rank.model, step.plan
    plan.compiled.writes.add((model.stages, model.ends))
    # By stage, since a chunk may hold stages of several kinds.
    usage_of = {k: usage for stages, _, usage in step.usage for k in stages}
    usages = [usage_of[k] for k in range(len(usage_of))]
    count, again = plan.schedule.num_units, step.request.counts
    return DeclaredState(step.rank, usages, step.usage_of_ends, count, again=again)
