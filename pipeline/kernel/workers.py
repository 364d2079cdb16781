"""A rank's actions where stages are not alike: one worker per lane, memory for all of them.

Letters: S ranks. Each worker is the `Actions` of a pipeline whose stages are all like those of its
lane; what differs is only where it finds things. Which worker a rank calls in a slot follows from
the slot's branch and from the lanes of the rank's own stages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE
from pipeline.backward.masks import chosen
from pipeline.base.tree import Leaves, Tree
from pipeline.kernel import scopes
from pipeline.kernel.actions import Actions, Row
from pipeline.kernel.masked import run_masked
from pipeline.kernel.memory import Seen, SeenTotal
from pipeline.model.overlay import Spot, View
from pipeline.rank.cell import Cell
from pipeline.rank.lanes import SharedHalves, SharedResiduals, WithOutput
from schedules.lowering.program import Op, Program, Slot


def runner(actions: Actions, *, masked: bool) -> Callable[[Slot, Row], Tree]:
    """What runs a slot for a rank."""
    if isinstance(actions, Crew):
        return actions.run_masked if masked else actions.run_slot
    return functools.partial(run_masked, actions) if masked else actions.run_slot


class Crew(Actions):
    """The actions of a rank whose stages belong to lanes."""

    def __init__(self, cell: Cell, program: Program, **options: Any) -> None:
        super().__init__(cell, program, **options)
        self.workers = [Worker(self, program, index) for index in range(len(cell.lanes))]

    def run_slot(self, slot: Slot, row: Row, message: Tree = None) -> Tree:
        """Do the slot's action, lane by lane; returns its message."""
        message = self.no_message() if message is None else message
        for worker in self.workers:
            part, here = worker.share(slot, row)
            if part.ops:
                with jax.named_scope(scopes.of_stages(worker.lane.stages)):
                    message = worker.run_slot(part, here, message)
        return message

    def run_masked(self, slot: Slot, row: Row) -> Tree:
        """The same without conditionals: every rank computes every lane."""
        message = self.no_message()
        for worker in self.workers:
            part, here = worker.share(slot, row)
            if part.ops:
                found, real = run_masked(worker, part, here), here["op"] != 0
                message = jax.tree.map(lambda a, b, r=real: jnp.where(r, a, b), found, message)
        return message


class Worker(Actions):
    """The actions of one lane, in the crew's memory."""

    def __init__(self, crew: Crew, program: Program, index: int) -> None:
        vars(self).update(vars(crew))
        self.lane = lane = crew.cell.lanes[index]
        self._program = program
        self.cell = lane.view(crew.cell)
        self.buffers = Seen(crew.buffers, lane.x_view, lane.x, self.cell.axes)
        self.returned = Seen(crew.buffers, lane.y_view, lane.y, self.cell.axes)
        if isinstance(crew.residuals, SharedResiduals):
            view = crew.residuals.views[index]
            self.residuals = crew.residuals.of[index]
            self.stashes = Seen(crew.stashes, view, None, self.cell.axes)
        if isinstance(crew.halves, SharedHalves):
            self.halves = crew.halves.of[index]
            view = crew.halves.views[index]
            self.crossings = Seen(crew.crossings, view, None, self.cell.axes)
        if self.training:
            self._see_totals(crew)

    def _see_totals(self, crew: Crew) -> None:
        """Find this lane's sums among those of its chunk: of what is trained in any lane."""
        chunk, views, own = self.lane.seat.chunk, self.lane.seat.views, self.lane.way.weights
        summed = crew.cell.model.trained.chunks[chunk]
        if views is None and own == summed:
            return
        total = crew.chunk_grads[chunk]
        place = {cell: n for n, cell in enumerate(np.flatnonzero(summed).tolist())}
        if views is None:
            refs = {n: total.refs[place[n]] for n in np.flatnonzero(own).tolist()}
            mine = [Spot(place[n], None, ref.shape) for n, ref in refs.items()]
        else:
            spots = chosen(views.params.spots, own)
            mine = [dataclasses.replace(spot, cell=place[spot.cell]) for spot in spots]
        self.chunk_grads = list(crew.chunk_grads)
        self.chunk_grads[chunk] = SeenTotal(total, tuple(mine))

    def share(self, slot: Slot, row: Row) -> tuple[Slot, Row]:
        """What of a slot is this lane's: its ops, and the row with their branch, or idle."""
        schedule = self._program.schedule
        doers: dict[Op, list[int]] = {op: [] for op in slot.ops}
        for k in self.lane.stages:
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
        return part, {**row, "op": mine[row["op"]]}

    def _run(self, op: Op, row: Row) -> Tree:
        total = self.chunk_grads[op.chunk]
        if op.kind == "F" or not isinstance(total, SeenTotal):
            return super()._run(op, row)
        total.begin()
        message = super()._run(op, row)
        total.end(changed=op.kind != "I" or bool(self.halves.whole))
        return message

    def sent(self, y: Tree) -> Tree:
        """An output as a message."""
        return self._message(y, self.lane.y_view)

    def as_message(self, floats: Leaves) -> Tree:
        """A gradient for the input as a message."""
        return self._message(super().as_message(floats), self.lane.x_view)

    def own_output(self, row: Row) -> Tree:
        """The last stage's own output."""
        if isinstance(self.residuals, WithOutput):
            return self.residuals.output(self.stashes[row["stash"]])
        return super().own_output(row)

    def _message(self, value: Tree, view: View | None) -> Tree:
        return self.no_message() if view is None else view.fill(self.no_message(), value)
