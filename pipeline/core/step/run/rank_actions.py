"""The actions of a rank for each kind of its stages, in storage that all kinds share.

Letters: S ranks. In a slot, the slot's branch and the kinds of the rank's stages determine the kind
whose action the rank runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import STAGE
from pipeline.base.tree import Tree
from pipeline.core.autodiff.jaxpr import scopes
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.run.actions import Actions
from pipeline.core.step.run.carries import make_carries
from pipeline.core.step.run.places import make_places
from pipeline.core.step.stores.store import Row
from schedules.lowering.needs import last_in_windows
from schedules.lowering.program import Op, Program, Slot


class RankActions:
    """The actions of a rank during a step.

    Attributes:
      sums, stores: the sums of the step, and the storage of values between actions.
    """

    def __init__(self, step: OpenedStep, program: Program) -> None:
        self.step, self.program = step, program
        self.sums, self.stores, places = make_places(step, program)
        triples = zip(step.kinds, make_carries(step, program), places, strict=True)
        self.kinds = [Actions(kind, step.request, slices=own, **of) for kind, own, of in triples]
        self.no_message = self.kinds[0].no_message

    @property
    def unsplit(self) -> tuple[str, ...]:
        """Descriptions of the operations that could not be split into I and W."""
        halves = [actions.halves for actions in self.kinds if actions.halves]
        return tuple(dict.fromkeys(text for of in halves for text in of.whole))

    @property
    def gathers(self) -> bool:
        """Whether a backward repeats an all-gather."""
        of_kinds = [actions.saved.residuals for actions in self.kinds]
        return any(residuals is not None and residuals.gathers for residuals in of_kinds)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the program's windows for its ticks; then reduce the gradients still in them."""
        weights, windows = self.step.rank.chunks, self.program.windows
        if windows is None:
            yield
            return
        weights.windows.open(weights, self.step.rank.axes, windows.weights)
        try:
            yield
        finally:
            weights.windows.close()
        # Ranks end with gradients of different chunks in their windows. All ranks run this
        # reduction, outside of branches: a rank whose windows have no gradients of the chunk adds
        # zeros.
        rank, totals = jax.lax.axis_index(STAGE), self.sums.chunk_grads
        for chunk, on_ranks in last_in_windows(self.program).items():
            is_there: Any = True if all(on_ranks) else jnp.asarray(on_ranks)[rank]
            totals[chunk].add_parts(totals[chunk].shared_out(is_there))

    def run_slot(self, slot: Slot, row: Row, message: Tree) -> Tree:
        """Run the slot's action, if this rank has one; return its message, or else ``message``."""
        if len(self.kinds) == 1:
            return self.kinds[0].run_slot(slot, row, message)
        for actions in self.kinds:
            # Each kind gets the slot with only its own ops. At most one kind has this rank's
            # action, and the other kinds return the message unchanged.
            part, own_row = self._share(actions.kind, slot, row)
            if part.ops:
                with jax.named_scope(scopes.of_stages(actions.kind.stages)):
                    message = actions.run_slot(part, own_row, message)
        return message

    def _share(self, kind: StageKind, slot: Slot, row: Row) -> tuple[Slot, Row]:
        """Restrict a slot to a kind's ops; the row selects their branch, or the idle one."""
        schedule = self.program.schedule
        # One op may belong to several kinds: chunk 0 can be of one kind on rank 0 and of another on
        # rank 1. So each kind needs the ranks on which it runs an op.
        doers: dict[Op, list[int]] = {op: [] for op in slot.ops}
        for k in kind.stages:
            of_stage = schedule.chunk_of[k], *self.program.ends_of(k)
            for op in slot.ops:
                if (op.chunk, op.first, op.last) == of_stage:
                    doers[op].append(schedule.placement[k])
        # A table maps the program's branch numbers to the kind's branch numbers. Ops of other kinds
        # map to the idle branch 0. All ranks run this code, so a rank reads its own line of the
        # table.
        ops = tuple(op for op, ranks in doers.items() if ranks)
        table = np.zeros((schedule.num_ranks, len(slot.ops) + 1), np.int32)
        for branch, op in enumerate(ops, start=1):
            table[doers[op], slot.ops.index(op) + 1] = branch
        part = Slot(slot.kinds, ops, slot.channels)
        if not ops:
            return part, row
        mine = jnp.asarray(table)[jax.lax.axis_index(STAGE)]
        chosen_op = mine[row["op"]]
        # If slices differ in length, a kind runs only one slice. The slice of an action is known
        # only in the tick.
        if (number := kind.rank.slices.number) is not None:
            is_mine = row["microbatch"] % schedule.num_slices == number
            chosen_op = jnp.where(is_mine, chosen_op, 0)
        return part, {**row, "op": chosen_op}
