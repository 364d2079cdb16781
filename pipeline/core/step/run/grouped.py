"""A rank's actions where stages are not alike: those of each group, in one memory.

Letters: S ranks. A group's actions are those of a pipeline whose stages are all like the group's;
what differs is only where they find things. Which group's a rank runs in a slot follows from the
slot's branch and from the groups of the rank's own stages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE
from pipeline.base.masks import chosen
from pipeline.base.tree import Leaves, Tree
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.model.overlay import Spot, View
from pipeline.core.step.calls.groups import (
    GroupedModel,
    SharedHalves,
    SharedResiduals,
    StageGroup,
    WithOutput,
)
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.run.actions import Actions, Row
from pipeline.core.step.stores.device import (
    Memory,
    PaddedPool,
    PoolView,
    StepRequest,
    make_memory,
)
from pipeline.core.step.stores.host import HostView, with_hosted
from pipeline.core.step.stores.slices import make_carries
from pipeline.core.step.stores.totals import TotalView
from schedules.lowering.program import Op, Program, Slot


def make_actions(local: LocalModel, program: Program, step: StepRequest) -> Actions:
    """The actions of a rank, whose stages may be alike or not."""
    memory = with_hosted(make_memory(local, program, step), local, program)
    carries = make_carries(local, program, training=step.training)
    if isinstance(local, GroupedModel):
        return GroupedActions(local, program, step, memory, carries)
    memory = dataclasses.replace(memory, carries=carries[0] if carries else None)
    return Actions(local, step, memory)


def runner(actions: Actions, *, masked: bool) -> Callable[[Slot, Row, Tree], Tree]:
    """Make the function that runs a slot for a rank and returns its message, or the placeholder."""
    if not masked:
        return actions.run_slot
    from pipeline.core.step.run.masked import run_masked

    if isinstance(actions, GroupedActions):
        return actions.run_masked
    return functools.partial(run_masked, actions)


class GroupedActions(Actions):
    """The actions of a rank whose stages belong to groups."""

    def __init__(
        self,
        local: GroupedModel,
        program: Program,
        step: StepRequest,
        memory: Memory,
        carries: Sequence[Any],
    ) -> None:
        super().__init__(local, step, memory)
        self.carries = carries
        self.groups = [
            GroupActions(self, program, n, group) for n, group in enumerate(local.groups)
        ]

    def run_slot(self, slot: Slot, row: Row, message: Tree) -> Tree:
        """Do the slot's action, group by group; returns its message, or else ``message``."""
        for one in self.groups:
            part, here = one.share(slot, row)
            if part.ops:
                with jax.named_scope(scopes.of_stages(one.group.stages)):
                    message = one.run_slot(part, here, message)
        return message

    def run_masked(self, slot: Slot, row: Row, message: Tree) -> Tree:
        """Run a slot without conditionals: every rank computes every group."""
        from pipeline.core.step.run.masked import run_masked

        for one in self.groups:
            part, here = one.share(slot, row)
            if part.ops:
                found, real = run_masked(one, part, here, message), here["op"] != 0
                message = jax.tree.map(lambda a, b, r=real: jnp.where(r, a, b), found, message)
        return message


class GroupActions(Actions):
    """The actions of one group, in the memory of the rank's.

    Args:
      whole: the rank's actions.
      program: what runs.
      index: of the group.
      group: the stages whose actions these are.
    """

    def __init__(
        self, whole: GroupedActions, program: Program, index: int, group: StageGroup
    ) -> None:
        own, memory = group.local, whole.memory
        seen: dict[str, Any] = {
            "buffers": PoolView(memory.buffers, group.x_view, own.activation, own.axes),
            "returned": PoolView(memory.buffers, group.y_view, own.output, own.axes),
        }
        if isinstance(memory.residuals, SharedResiduals):
            seen["residuals"] = memory.residuals.of[index]
            view = memory.residuals.views[index]
            seen["stashes"] = PoolView(memory.stashes, view, None, own.axes)
            if memory.host_stashes:
                seen["host_stashes"] = HostView(memory.host_stashes, view, None, own.axes)
        elif memory.host_stashes:
            pool, types = memory.host_stashes, own.activation
            seen["host_stashes"] = HostView(pool, group.x_view, types, own.axes)
        if isinstance(memory.halves, SharedHalves):
            seen["halves"] = memory.halves.of[index]
            view = memory.halves.views[index]
            seen["crossings"] = PoolView(memory.crossings, view, None, own.axes)
            if memory.host_crossings:
                seen["host_crossings"] = HostView(memory.host_crossings, view, None, own.axes)
        if whole.carries:
            seen["carries"] = whole.carries[index]
        if group.part is not None:
            seen["results"] = PaddedPool(memory.results)
            seen["input_grads"] = PaddedPool(memory.input_grads)
        seen["keep"] = own.keep
        if whole.step.training:
            seen["chunk_grads"] = _own_totals(memory, group)
        super().__init__(own, whole.step, dataclasses.replace(memory, **seen))
        self.group, self._program = group, program

    def share(self, slot: Slot, row: Row) -> tuple[Slot, Row]:
        """Restrict a slot to this group: its ops, and the row with their branch, or idle."""
        schedule = self._program.schedule
        doers: dict[Op, list[int]] = {op: [] for op in slot.ops}
        for k in self.group.stages:
            for op in slot.ops:
                if (op.chunk, op.first, op.last) == (
                    schedule.chunk_of[k],
                    *self._program.ends_of(k),
                ):
                    doers[op].append(schedule.placement[k])
        ops = tuple(op for op, ranks in doers.items() if ranks)
        table = np.zeros((schedule.num_ranks, len(slot.ops) + 1), np.int32)
        for branch, op in enumerate(ops, start=1):
            table[doers[op], slot.ops.index(op) + 1] = branch
        part = Slot(slot.kinds, ops, slot.channels)
        if not ops:
            return part, row
        mine = jnp.asarray(table)[jax.lax.axis_index(STAGE)]
        chosen_op = mine[row["op"]]
        if self.group.part is not None:
            own = row["microbatch"] % schedule.num_slices == self.group.part
            chosen_op = jnp.where(own, chosen_op, 0)
        return part, {**row, "op": chosen_op}

    def _run(self, op: Op, row: Row) -> Tree:
        total = self.memory.chunk_grads[op.chunk]
        if op.kind == "F" or not isinstance(total, TotalView):
            return super()._run(op, row)
        total.begin()
        message = super()._run(op, row)
        total.end(changed=op.kind != "I" or bool(self.memory.halves.whole))
        return message

    def sent(self, y: Tree) -> Tree:
        """An output as a message."""
        return self._message(y, self.group.y_view)

    def as_message(self, floats: Leaves) -> Tree:
        """A gradient for the input as a message."""
        return self._message(super().as_message(floats), self.group.x_view)

    def own_output(self, row: Row, stash: Any) -> Tree:
        """The last stage's own output."""
        if isinstance(self.memory.residuals, WithOutput):
            return self.memory.residuals.output(stash)
        return super().own_output(row, stash)

    def _message(self, value: Tree, view: View | None) -> Tree:
        return self.no_message() if view is None else view.fill(self.no_message(), value)


def _own_totals(memory: Memory, group: StageGroup) -> list[Any]:
    """A group's sums among those of its chunk: of what is trained in any group."""
    chunk, views, own = group.seat.chunk, group.seat.views, group.local.trained
    summed = group.local.model.trained.chunks[chunk]
    found, total = list(memory.chunk_grads), memory.chunk_grads[chunk]
    added = memory.added.refs if group.local.adds else []
    if views is None and own == summed:
        found[chunk] = total.beside(added)
        return found
    place = {cell: n for n, cell in enumerate(np.flatnonzero(summed).tolist())}
    if views is None:
        refs = {n: total.refs[place[n]] for n in np.flatnonzero(own).tolist()}
        mine = [Spot(place[n], None, ref.shape) for n, ref in refs.items()]
    else:
        spots = chosen(views.params.spots, own)
        mine = [dataclasses.replace(spot, cell=place[spot.cell]) for spot in spots]
    found[chunk] = TotalView(total, tuple(mine), added)
    return found
