"""A rank's actions for stages that are not alike: the actions of each group, in shared storage.

Letters: S ranks. A group has the actions of a pipeline of equal stages; only the places of values
differ. In a slot, the slot's branch and the groups of the rank's stages determine the group whose
action the rank runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE
from pipeline.base.masks import chosen
from pipeline.base.tree import Leaves, Tree
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.model.overlay import View
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.groups import (
    GroupedModel,
    SharedHalves,
    SharedResiduals,
    StageGroup,
)
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.run.carries import make_carries
from pipeline.core.step.run.places import StepPlaces, StepRequest, make_places
from pipeline.core.step.stores.device import PaddedPool
from pipeline.core.step.stores.slices import WholeSequences
from pipeline.core.step.stores.store import Row
from pipeline.core.step.stores.totals import StepSums, TotalView
from schedules.lowering.program import Op, Program, Slot


def make_actions(plan: Plan, local: LocalModel, program: Program, step: StepRequest) -> Actions:
    places = make_places(plan, local, program, step)
    slices = make_carries(local, program, training=step.training)
    if isinstance(local, GroupedModel):
        return GroupedActions(local, program, step, places, slices)
    return Actions(local, step, places, slices[0])


class GroupedActions(Actions):
    """The actions of a rank whose stages belong to groups."""

    def __init__(
        self,
        local: GroupedModel,
        program: Program,
        step: StepRequest,
        places: StepPlaces,
        slices: Sequence[WholeSequences],
    ) -> None:
        super().__init__(local, step, places, slices[0])
        self.groups = [
            GroupActions(group, program, step, _places_of(places, n, group, step), of)
            for n, (group, of) in enumerate(zip(local.groups, slices, strict=True))
        ]

    def run_slot(self, slot: Slot, row: Row, message: Tree) -> Tree:
        for actions in self.groups:
            # Each group gets the slot with only its own ops. At most one group has this rank's
            # action, and the other groups return the message unchanged.
            part, here = actions.share(slot, row)
            if part.ops:
                with jax.named_scope(scopes.of_stages(actions.group.stages)):
                    message = actions.run_slot(part, here, message)
        return message


class GroupActions(Actions):
    """The actions of one group, in storage that all groups share.

    Args:
      group: the group of stages.
      program: the program that runs.
      step: the wanted results.
      places: the group's view of the storage.
      slices: the carries between slices of sequences.
    """

    def __init__(
        self,
        group: StageGroup,
        program: Program,
        step: StepRequest,
        places: StepPlaces,
        slices: WholeSequences,
    ) -> None:
        super().__init__(group.local, step, places, slices)
        self.group, self._program = group, program

    def share(self, slot: Slot, row: Row) -> tuple[Slot, Row]:
        """Restrict a slot to this group's ops; the row selects their branch, or the idle one."""
        schedule = self._program.schedule
        # One op may belong to several groups: chunk 0 can be in one group on rank 0 and in another
        # on rank 1. So each group needs the ranks on which it runs an op.
        doers: dict[Op, list[int]] = {op: [] for op in slot.ops}
        for k in self.group.stages:
            for op in slot.ops:
                if (op.chunk, op.first, op.last) == (
                    schedule.chunk_of[k],
                    *self._program.ends_of(k),
                ):
                    doers[op].append(schedule.placement[k])
        # A table maps the program's branch numbers to the group's branch numbers. Ops of other
        # groups map to the idle branch 0. All ranks run this code, so a rank reads its own line of
        # the table.
        ops = tuple(op for op, ranks in doers.items() if ranks)
        table = np.zeros((schedule.num_ranks, len(slot.ops) + 1), np.int32)
        for branch, op in enumerate(ops, start=1):
            table[doers[op], slot.ops.index(op) + 1] = branch
        part = Slot(slot.kinds, ops, slot.channels)
        if not ops:
            return part, row
        mine = jnp.asarray(table)[jax.lax.axis_index(STAGE)]
        chosen_op = mine[row["op"]]
        # If slices differ in length, a group runs only one slice. The slice of an action is known
        # only in the tick.
        if self.group.part is not None:
            is_mine = row["microbatch"] % schedule.num_slices == self.group.part
            chosen_op = jnp.where(is_mine, chosen_op, 0)
        return part, {**row, "op": chosen_op}

    def sent(self, y: Tree) -> Tree:
        # The model's last output may fit no message; it is not sent.
        return self._message(y, self.group.y_view)

    def as_message(self, floats: Leaves) -> Tree:
        return self._message(super().as_message(floats), self.group.x_view)

    def _message(self, value: Tree, view: View | None) -> Tree:
        return self.no_message() if view is None else view.fill(self.no_message(), value)


def _places_of(places: StepPlaces, index: int, group: StageGroup, step: StepRequest) -> StepPlaces:
    """Make the view of group ``index`` of the storage that all groups of a rank share."""
    local, sums = group.local, places.sums
    residuals, halves = places.residuals, places.halves
    # For each kind of value: its view, and its types, or None if only the view needs them.
    views: dict[str, tuple[View | None, Any]] = {
        "operand": (group.x_view, local.activation),
        "gradient": (group.y_view, local.output),
        "stash": (group.x_view, local.activation),
    }
    if isinstance(residuals, SharedResiduals):
        residuals, views["stash"] = residuals.of[index], (residuals.views[index], None)
    if isinstance(halves, SharedHalves):
        halves, views["crossing"] = halves.of[index], (halves.views[index], None)
    changes: dict[str, Any] = {"keep": local.keep}
    if group.part is not None:
        changes["results"] = PaddedPool(sums.results)
        changes["input_grads"] = PaddedPool(sums.input_grads)
    if step.training:
        changes["chunk_grads"] = own_totals(sums, group)
    sums = dataclasses.replace(sums, **changes)
    return StepPlaces(sums, places.stores.viewed(views, local.axes), residuals, halves)


def own_totals(sums: StepSums, group: StageGroup) -> list[Any]:
    """Select a group's sums from its chunk's sums, which cover every group."""
    chunk, trained, rank = group.position.chunk, group.local.trained, group.local.rank
    totals, total = list(sums.chunk_grads), sums.chunk_grads[chunk]
    added = sums.added.refs if group.local.adds else []
    # Refs exist for leaves that any stage of the chunk trains. A group whose leaves fill all refs
    # adds to the refs directly; other groups need a map from leaves to refs.
    cells = np.flatnonzero(rank.model.trained.chunks[chunk]).tolist()
    place = {cell: n for n, cell in enumerate(cells)}
    spots = chosen(group.position.views.params.places(rank.chunks.shards[chunk]), trained)
    mine = [dataclasses.replace(spot, cell=place[spot.cell]) for spot in spots]
    if [(spot.cell, spot.part) for spot in mine] == [(n, None) for n in range(len(cells))]:
        totals[chunk] = total.beside(added)
        return totals
    totals[chunk] = TotalView(total, tuple(mine), added)
    return totals
