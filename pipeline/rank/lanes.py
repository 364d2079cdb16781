"""Stages that are not alike, in one kernel.

Letters: S ranks, K stages, V chunks. A *lane* is a set of stages of one chunk that are one
computation: their static halves, the layout of their values, the types of their input and output
and what is trained of them are equal. Every lane has branches of its own for what its stages do,
and in a slot a rank takes the branch of the lane that its stage belongs to. Within a lane
everything is as if all stages were equal: its `Cell` and its `Actions` are the rank's, seen through
views (`pipeline.model.overlay`) that find a lane's weights, messages and stashes in arrays that all
lanes share.

A model of equal stages has no lanes, and nothing here is run for it.

Messages are as large as the largest activation between two stages. The model's first input and
last output are not among those: nobody sends them. Where a stage's output is no message, what its
backward needs of it is stashed beside its residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from pipeline.backward.accumulate import Pullback
from pipeline.backward.masks import Way
from pipeline.backward.residuals import Residuals
from pipeline.base.tree import Leaves, Tree, signature
from pipeline.model.overlay import View, overlay_trees
from pipeline.model.stage import Seat
from pipeline.rank.seen import code, seen_by

if TYPE_CHECKING:
    from pipeline.rank.cell import Cell


@dataclass(frozen=True, eq=False)
class Lane:
    """Stages of one chunk that share their code.

    Attributes:
      stages: their indices; seat: that of the first.
      x, y: the types of their input and output.
      way: how far their backward goes.
      x_view, y_view: x and y as messages, None where no message has that type.
    """

    stages: tuple[int, ...]
    seat: Seat
    x: Tree
    y: Tree
    way: Way
    x_view: View | None
    y_view: View | None

    def view(self, cell: Cell) -> Cell:
        """The rank's cell as these stages see it."""
        return seen_by(cell, self.seat, self.x, self.y, self.way)


def make_lanes(cell: Cell, activations: list[Tree]) -> tuple[list[Any], tuple[Lane, ...]]:
    """The types of a message's cells, and the lanes of all stages."""
    between = {signature(x): x for x in activations[1:-1]}
    wire, views = overlay_trees(list(between.values()))
    view_of = dict(zip(between, views, strict=True))
    members: dict[Any, list[int]] = {}
    for k, seat in enumerate(cell.model.stages):
        ends = signature(activations[k]), signature(activations[k + 1])
        members.setdefault((code(cell, seat), seat.chunk, ends, cell.ways[k]), []).append(k)
    lanes = [
        Lane(
            tuple(stages),
            cell.model.stages[stages[0]],
            activations[stages[0]],
            activations[stages[0] + 1],
            way,
            *(view_of.get(end) for end in ends),
        )
        for (_, _, ends, way), stages in members.items()
    ]
    return wire, tuple(lanes)


class WithOutput:
    """Residuals whose stash also holds the stage's output."""

    def __init__(self, residuals: Residuals, y: Tree) -> None:
        self._residuals, self._y_tree = residuals, jax.tree.structure(y)
        self.stashed = [*residuals.stashed, *jax.tree.leaves(y)]

    def forward(self, *arguments: Any) -> tuple[Tree, Leaves]:
        """The stage's output, and what to stash."""
        y, stash = self._residuals.forward(*arguments)
        return y, [*stash, *jax.tree.leaves(y)]

    def backward(self, weights: Leaves, fixed: Tree, side: Tree, stash: Leaves) -> Pullback:
        """The stage's pullback."""
        own = stash[: len(self._residuals.stashed)]
        return self._residuals.backward(weights, fixed, side, own)

    def output(self, stash: Leaves) -> Tree:
        """The stage's output, out of its stash."""
        return jax.tree.unflatten(self._y_tree, stash[len(self._residuals.stashed) :])


class SharedResiduals:
    """The residuals of every lane, and stashes that hold those of any.

    Attributes:
      stashed: the types of what is stashed for one microbatch.
      of: [lanes] `Residuals`, and views, [lanes] the views of their stashes.
    """

    def __init__(self, cell: Cell) -> None:
        last = len(cell.model.stages) - 1
        self.of: list[Any] = []
        for lane in cell.lanes:
            residuals = lane.view(cell).residuals()
            kept_elsewhere = last not in lane.stages or lane.y_view is not None
            self.of.append(residuals if kept_elsewhere else WithOutput(residuals, lane.y))
        self.stashed, self.views = overlay_trees([residuals.stashed for residuals in self.of])


class SharedHalves:
    """The split backwards of every lane, and places for what crosses in any.

    Attributes:
      crossing: the types of what crosses for one microbatch.
      whole: descriptions of what could not be taken apart.
      of: [lanes] `SplitBackward`, and views, [lanes] the views of what crosses.
    """

    def __init__(self, cell: Cell, residuals: SharedResiduals | None, *, in_place: bool) -> None:
        starts = residuals.of if residuals else [None] * len(cell.lanes)
        self.of = [
            lane.view(cell).split_backward(start, in_place=in_place)
            for lane, start in zip(cell.lanes, starts, strict=True)
        ]
        self.whole = list(dict.fromkeys(text for halves in self.of for text in halves.whole))
        self.crossing, self.views = overlay_trees([halves.crossing for halves in self.of])
