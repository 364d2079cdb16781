"""A rank's model, traced once: the facts that a step needs before its first tick.

Parts of the model are traced on the types of one microbatch, whose index is the Python integer 0.
In an action of a tick the index is an array, so the code can distinguish the two. Values that all
actions share are made here once: narrow copies of weights, and the batch of each slice. The step
then runs the functions of `Inspected.local`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.added import Adding
from pipeline.base.masks import Needs
from pipeline.core.autodiff.jaxpr.primitives import makes_ref
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations, follow
from pipeline.core.step.calls.declared import DeclaredState, Usage
from pipeline.core.step.calls.ends import ends_usage
from pipeline.core.step.calls.groups import make_local_model
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.rank import LossScale, Rank
from pipeline.core.step.casts import cast_once


@dataclass(frozen=True, eq=False)
class Inspected:
    """A rank whose model has been traced.

    Attributes:
      rank: the rank, with all facts of the trace.
      activations: the types between stages.
      needs: [K] the gradients that each stage's backward computes.
      ends_body: the jaxpr of embed, head and loss; None if no loss is computed.
      adding: the losses that embed and head add, by name.
      usage: for each kind of stage, the use of declared state.
      usage_of_ends: the use of declared state in embed, head and loss; None without such state.
    """

    rank: Rank
    activations: Activations
    needs: Needs
    ends_body: Any = None
    adding: Mapping[str, Adding] = field(default_factory=dict)
    usage: Sequence[tuple[Sequence[int], LocalModel, Usage]] = ()
    usage_of_ends: Usage | None = None

    def on(self, rank: Rank) -> Inspected:
        """Apply these facts to arrays of another trace; parts of the model are not traced again."""
        loss = dataclasses.replace(rank.loss, is_mean=self.rank.loss.is_mean)
        rank = dataclasses.replace(rank, facts=self.rank.facts, loss=loss)
        return dataclasses.replace(self, rank=_prepared(rank, self.activations))

    def without_arrays(self, loss: LossScale) -> Inspected:
        """Return the facts without arrays, with other factors of losses."""
        rank = dataclasses.replace(self.rank.without_arrays(), loss=loss)
        usage: Any = [(stages, None, usage) for stages, _, usage in self.usage]
        return dataclasses.replace(self, rank=rank, usage=usage, ends_body=None)

    def local(self, **changes: Any) -> LocalModel:
        """Make the rank's part of the model; ``changes`` replace fields of the rank."""
        rank = dataclasses.replace(self.rank, **changes)
        return make_local_model(rank, self.activations, self.needs)

    def writes_state(self, plan: Plan, *, training: bool) -> bool:
        """Tell whether a call of a part, or the user's hook after the step, writes state."""
        if self.usage_of_ends is None:
            return False
        hook = plan.after_step is not None and training
        calls = any(self.usage_of_ends[0]) or any(any(usage[0]) for _, _, usage in self.usage)
        return hook or calls

    def make_declared_state(self, plan: Plan, *, training: bool) -> DeclaredState | None:
        """Make the storage of declared state for a step; None if the step writes no state."""
        if self.usage_of_ends is None or not self.writes_state(plan, training=training):
            return None
        model = self.rank.model
        plan.compiled.writes.add((model.stages, model.ends))
        # By stage, since a chunk may hold stages of several kinds.
        usage_of = {k: usage for stages, _, usage in self.usage for k in stages}
        usages = [usage_of[k] for k in range(len(usage_of))]
        count = plan.schedule.num_units
        return DeclaredState(self.rank, usages, self.usage_of_ends, count, again=training)


def inspect(
    plan: Plan,
    rank: Rank,
    needs: Needs,
    *,
    take_loss: bool = True,
    reaches: bool = True,
) -> Inspected:
    """Trace the parts of a rank's model.

    Args:
      plan: the options of the pipeline.
      rank: the rank.
      needs: [K] the gradients that each stage's backward computes.
      take_loss: whether a loss is computed.
      reaches: whether embed receives a gradient.

    Raises:
      ValueError: losses are added by a head that all ranks share, or by an embed without a
        gradient.
    """
    # Each trace needs the facts of the earlier ones: types of activations, then the casts in the
    # bodies of stages, then head and loss on the last activation, then state.
    rank, activations = follow(rank)
    plan.lint.parts(plan, rank, activations, take_loss=take_loss)
    traced = Inspected(_prepared(rank, activations), activations, needs)
    if take_loss:
        traced = _with_ends(plan, traced, reaches=reaches)
    else:
        plan.lint.ends(rank, activations)
    if rank.model.declared.is_anything:
        traced = _with_usage(traced, take_loss=take_loss)
    return traced


def _prepared(rank: Rank, activations: Activations) -> Rank:
    """Add the values that all actions share to the rank."""
    rank = dataclasses.replace(rank, chunks=cast_once(rank, activations.bodies))
    # The batch is cut once here; otherwise each model of the rank would cut it again.
    return dataclasses.replace(rank, batches=tuple(one.batch for one in rank.by_slice))


def _with_ends(plan: Plan, traced: Inspected, *, reaches: bool) -> Inspected:
    """Trace embed, head and loss, to find whether the loss is a mean and which losses are added."""
    is_mean, body, of_embed, of_head = traced.local().loss_is_mean()
    if of_head.is_used and "head" in plan.shared:
        raise ValueError(
            "the head calls add_loss, and all ranks share it (vocabulary='stage'), so that no one "
            "of them runs it; add the loss in the last stage, or use vocabulary='ends'"
        )
    if of_embed.is_used and not reaches:
        raise ValueError(
            "embed calls add_loss, and wrt= trains nothing in it, so that no gradient goes back to "
            "it; train embed too, or let it add nothing"
        )
    # Facts change how a part is called: refs become values, and a call that adds losses returns
    # their sum. So the rank gets the facts before it makes the functions that run.
    rank = traced.rank.with_facts(
        has_refs=traced.rank.facts.has_refs or makes_ref(body),
        adding_ends=of_embed.is_used or of_head.is_used,
        adding_embed=of_embed.is_used,
    )
    rank = dataclasses.replace(rank, loss=dataclasses.replace(rank.loss, is_mean=is_mean))
    adding = {"embed": of_embed, "the head": of_head}
    return dataclasses.replace(traced, rank=rank, ends_body=body, adding=adding)


def _with_usage(traced: Inspected, *, take_loss: bool) -> Inspected:
    """Trace which declared state each part writes, and which state affects its results."""
    local = traced.local()
    # The use of state decides which values the step keeps. One trace serves a kind of stage.
    usage = [(stages, kind, kind.stage_usage()) for stages, kind in local.kinds]
    of_ends = ends_usage(local.rank, local.output, take_loss=take_loss)
    return dataclasses.replace(traced, usage=usage, usage_of_ends=of_ends)
