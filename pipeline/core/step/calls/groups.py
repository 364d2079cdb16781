"""Stages that are not alike, in one kernel.

Letters: S ranks, K stages, V chunks. A *group* is a set of stages of one chunk that are one
computation: they agree in static half, layout of values, types of input and output, and trained
parameters. Every group has its own branches for the actions of its stages. In a slot, a rank takes
the branch of its stage's group. A group has the `LocalModel` and the `Actions` of a model of equal
stages; they read weights, messages and stashes from arrays that all groups share
(`pipeline.core.model.overlay`).

Slices that differ in length are groups too: every slice has its own branches, with arrays of its
length, which read no later slice. A model of equal stages and slices has no groups, and uses only
`make_local_model` of this module.

Messages are as large as the largest activation between two stages. The input of stage 0 and the
last output are never sent, so they are no messages. If no message has the type of a stage's output,
the output is stashed with the stage's residuals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pipeline.base.masks import Needs
from pipeline.base.tree import Leaves, Tree, signature
from pipeline.core.autodiff.accumulate import Pullback
from pipeline.core.autodiff.outcome import Outcome
from pipeline.core.autodiff.residuals import Residuals
from pipeline.core.model.overlay import View, overlay_trees
from pipeline.core.model.stage import StagePosition
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.calls.rank import Rank


@dataclass(frozen=True, eq=False)
class StageGroup:
    """Stages of one chunk that share their code.

    Attributes:
      stages: the indices of the stages.
      position: the position of the first stage.
      local: the functions of the stages.
      x_view, y_view: views of input and output in a message; None if no message has that type.
      part: the slice of sequences that the group runs; None if the group runs all slices.
    """

    stages: tuple[int, ...]
    position: StagePosition
    local: LocalModel
    x_view: View | None
    y_view: View | None
    part: int | None = None


class GroupedModel(LocalModel):
    """A rank's part of a model whose stages are not alike: the ends' functions, and groups.

    Attributes:
      groups: the groups of all stages.
    """

    def __init__(self, rank: Rank, activations: Activations, needs: Needs) -> None:
        pairs = list(zip(rank.by_slice, activations.by_slice, strict=True)) or [(rank, activations)]
        types = activations.types
        between = {signature(x): x for _, of in pairs for x in of.types[1:-1]}
        wire, views = overlay_trees(list(between.values()))
        # As a `LocalModel` it has the functions of the ends: stage 0's input and the last output.
        super().__init__(rank, rank.model.stages[0], types[0], types[-1], needs[0], wire)
        view_of = dict(zip(between, views, strict=True))

        def groups(rank: Rank, of_slice: Activations) -> Iterator[StageGroup]:
            all_ends = list(itertools.pairwise(map(signature, of_slice.types)))
            # Stages of a group also agree in the types of input and output and in the trained
            # parameters, because both change the code of a backward.
            for (_, _, ends, need), stages in rank.same_stages(all_ends, needs).items():
                k = stages[0]
                position = self.model.stages[k]
                of = rank, position, of_slice.types[k], of_slice.types[k + 1], need, wire
                more = {"carry": of_slice.carries[k], "earlier": activations.carries[k]}
                local = LocalModel(*of, **more, adds=rank.facts.adding_stages[k])
                x_view, y_view = map(view_of.get, ends)
                yield StageGroup(tuple(stages), position, local, x_view, y_view, rank.slices.number)

        self.groups = tuple(group for pair in pairs for group in groups(*pair))

    @property
    def kinds(self) -> list[tuple[Sequence[int], LocalModel]]:
        """The indices of the stages of each group, with the group's model."""
        return [(group.stages, group.local) for group in self.groups]

    def weight_of_targets(self) -> jax.Array | None:
        """Sum the weights of all losses, also for slices that differ in length."""
        if not self.rank.slices.lengths:
            return super().weight_of_targets()
        # The loss has another shape for each slice, so each slice's model sums its own weights.
        last = len(self.model.stages) - 1
        ends = [group.local for group in self.groups if last in group.stages]
        weights = [local.weight_of_targets() for local in ends]
        addends = [weight for weight in weights if weight is not None]
        return sum(addends[1:], addends[0]) if len(addends) == len(weights) else None

    def residuals(self) -> Any:
        return SharedResiduals(self)

    def split_backward(self, residuals: Any) -> Any:
        return SharedHalves(self, residuals)


def make_local_model(rank: Rank, activations: Activations, needs: Needs) -> LocalModel:
    """Make a rank's part of the model: for one kind of stages, or for several groups."""
    types, stages = activations.types, rank.model.stages
    # Stages need no groups if they have equal code, activations and needed gradients: then the
    # stages of a chunk differ only in their arrays.
    codes = set(map(rank.code, stages))
    is_alike = len(codes) == len(set(map(signature, types))) == len(set(needs)) == 1
    if is_alike and not rank.slices.lengths:
        (x, *_), adds = types, any(rank.facts.adding_stages)
        carry = activations.carries[0]
        return LocalModel(rank, stages[0], x, x, needs[0], x, carry=carry, adds=adds)
    return GroupedModel(rank, activations, needs)


class WithOutput:
    """Residuals whose stash also holds the stage's output."""

    holds_output = True

    def __init__(self, residuals: Residuals, y: Tree) -> None:
        self._residuals, self._y_tree = residuals, jax.tree.structure(y)
        self.stashed = [*residuals.stashed, *jax.tree.leaves(y)]
        self.gathers = residuals.gathers

    def forward(self, *arguments: Any) -> tuple[Outcome, Leaves]:
        outcome, stash = self._residuals.forward(*arguments)
        return outcome, [*stash, *jax.tree.leaves(outcome.value)]

    def backward(
        self, weights: Leaves, fixed: Tree, side: Tree, stash: Leaves, earlier: Tree = ()
    ) -> Pullback:
        stashed = stash[: len(self._residuals.stashed)]
        return self._residuals.backward(weights, fixed, side, stashed, earlier)

    def output(self, stash: Leaves) -> Tree:
        return jax.tree.unflatten(self._y_tree, stash[len(self._residuals.stashed) :])


class SharedResiduals:
    """The residuals of every group, and stashes that fit the residuals of any group.

    Attributes:
      stashed: the types of the stash for one microbatch.
      gathers: whether a backward repeats an all-gather.
      of: [groups] the `Residuals` of each group.
      views: [groups] the view of each group's stash.
    """

    def __init__(self, model: GroupedModel) -> None:
        last = len(model.model.stages) - 1
        self.of: list[Any] = []
        for group in model.groups:
            residuals = group.local.residuals()
            # The loss reads the last stage's output, which is stored like a message. If no message
            # has its type, it is stashed with the residuals.
            kept_elsewhere = last not in group.stages or group.y_view is not None
            if not kept_elsewhere:
                residuals = WithOutput(residuals, group.local.output)
            self.of.append(residuals)
        self.stashed, self.views = overlay_trees([residuals.stashed for residuals in self.of])
        self.gathers = any(residuals.gathers for residuals in self.of)


class SharedHalves:
    """The split backwards of every group, and storage that fits any group's crossing values.

    Attributes:
      crossing: the types of the values from I to W for one microbatch.
      whole: descriptions of the operations that could not be split.
      of: [groups] the `SplitBackward` of each group.
      views: [groups] the view of each group's crossing values.
    """

    def __init__(self, model: GroupedModel, residuals: SharedResiduals | None) -> None:
        starts = residuals.of if residuals else [None] * len(model.groups)
        self.of = [
            group.local.split_backward(start)
            for group, start in zip(model.groups, starts, strict=True)
        ]
        self.whole = list(dict.fromkeys(text for halves in self.of for text in halves.whole))
        self.crossing, self.views = overlay_trees([halves.crossing for halves in self.of])
