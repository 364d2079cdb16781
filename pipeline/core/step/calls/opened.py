"""An opened step: a rank's arrays, and the facts that a trace of its model has shown."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from pipeline.base.added import Adding
from pipeline.base.masks import Needs
from pipeline.base.tree import Leaves, signature
from pipeline.core.model.loss import LossMetrics
from pipeline.core.model.overlay import View, overlay_trees
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.declared import Usage
from pipeline.core.step.calls.ends import metrics_of
from pipeline.core.step.calls.kind import StageKind, key_of_kind
from pipeline.core.step.calls.rank import LossScale, Rank, StepRequest
from pipeline.core.step.stores.weights import gathered_ends

RunForwards = Callable[["OpenedStep"], tuple[Any, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step in addition to weights and batch.

    Attributes:
      scale: the argument of `pipeline.core.step.runtime.train`.
      ratio: share and mean of a loss whose weight depends on outputs, if programs have computed
        them before the step.
    """

    scale: Any = None
    ratio: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Once:
    """The arrays that a step computes once, as a program gives them to later programs.

    Attributes:
      factors: the factors of losses that are arrays, by field of `LossScale`.
      counts: the counts of padding, by field of `BatchPart`; empty if the batch has none.
      weights: the weights made narrow or whole (`ChunkWeights.made`, `gathered_ends`); None to make
        them again.
    """

    factors: dict[str, Any]
    counts: dict[str, Any]
    weights: dict[str, Leaves] | None = None


@dataclass(frozen=True, eq=False)
class OpenedStep:
    """A step on a rank, within one trace.

    Attributes:
      rank: the rank, with all facts of the trace, the factors of losses, and storage for declared
        state if the step writes any.
      needs: [K] the gradients that each stage's backward computes.
      ends_body: the jaxpr of embed, head and loss; None if no loss is computed.
      adding: the losses that embed and head add, by name.
      usage: for each kind of stage, the use of declared state.
      usage_of_ends: the use of declared state in embed, head and loss; None without such state.
    """

    plan: Plan
    request: StepRequest
    rank: Rank
    needs: Needs
    activations: Activations
    ends_body: Any = None
    adding: Mapping[str, Adding] = field(default_factory=dict)
    usage: Sequence[tuple[Sequence[int], StageKind, Usage]] = ()
    usage_of_ends: Usage | None = None

    @functools.cached_property
    def kinds(self) -> tuple[StageKind, ...]:
        return make_kinds(self)

    @functools.cached_property
    def metrics(self) -> tuple[Leaves, LossMetrics | None]:
        """The types of the sums for metrics, and the function from the sums to metrics."""
        return metrics_of(self.rank, self.activations.types[-1])

    @property
    def by_slice(self) -> list[tuple[Rank, Activations]]:
        """The rank and activations of each slice, if slices differ in length; else one pair."""
        pairs = list(zip(self.rank.by_slice, self.activations.by_slice, strict=True))
        return pairs or [(self.rank, self.activations)]

    @property
    def writes_state(self) -> bool:
        """True if a call of a part, or the user's hook after the step, writes state."""
        if self.usage_of_ends is None:
            return False
        hook = self.plan.after_step is not None and self.request.counts
        return hook or any(self.usage_of_ends[0]) or any(any(of[0]) for _, _, of in self.usage)

    @property
    def once(self) -> Once:
        loss, part = self.rank.loss, self.rank.batch_part
        factors = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
        factors = {name: x for name, x in factors.items() if isinstance(x, jax.core.Tracer)}
        counts = {name: x for name, x in vars(part).items() if isinstance(x, jax.core.Tracer)}
        made = self.rank.chunks.made
        if self.plan.gather == "step" and self.plan.stage_meshes is None:
            made = made | gathered_ends(self.rank.ends, self.rank.model.layout.ends)
        return Once(factors, counts, made)

    def with_rank(self, **changes: Any) -> OpenedStep:
        return dataclasses.replace(self, rank=dataclasses.replace(self.rank, **changes))

    def without_arrays(self, loss: LossScale) -> OpenedStep:
        """Copy the facts without arrays, with other factors of losses."""
        rank = dataclasses.replace(self.rank.without_arrays(), loss=loss)
        usage: Any = [(stages, None, usage) for stages, _, usage in self.usage]
        return dataclasses.replace(self, rank=rank, usage=usage, ends_body=None)


def make_kinds(step: OpenedStep) -> tuple[StageKind, ...]:
    """Sort stages by the computation that they share; slices that differ in length share none."""
    pairs, needs, longest = step.by_slice, step.needs, step.activations
    between = {signature(x): x for _, of in pairs for x in of.types[1:-1] or of.types[:1]}
    wire, views = overlay_trees(list(between.values()))
    # The input of stage 0 and the last output may have types that have no place in a message.
    view_of, not_stored = dict(zip(between, views, strict=True)), View(None, ())
    kinds: list[StageKind] = []
    for own, of in pairs:
        alike: dict[Any, list[int]] = {}
        for k, need in enumerate(needs):
            alike.setdefault(key_of_kind(own, k, of.types, need), []).append(k)
        kinds += (
            StageKind(
                own,
                members,
                x=of.types[k],
                y=of.types[k + 1],
                need=needs[k],
                wire=wire,
                x_view=view_of.get(signature(of.types[k]), not_stored),
                y_view=view_of.get(signature(of.types[k + 1]), not_stored),
                carry=of.carries[k],
                earlier=longest.carries[k],
                adds=own.facts.adding_stages[k],
            )
            for members in alike.values()
            for k in members[:1]
        )
    return tuple(kinds)
