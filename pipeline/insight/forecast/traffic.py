"""Bytes that each rank sends in a step, read off the traced step.

Letters: S ranks, n devices in a collective, P bytes. In a ring, each device sends

    all-reduce           2 (n - 1) / n P    P: the array that is summed
    all-gather             (n - 1) / n P    P: the whole array that each device gets
    reduce-scatter         (n - 1) / n P    P: the whole array that each device gives
    all-to-all             (n - 1) / n P    P: the array that each device gives
    collective-permute               P      if it is a source, read or not

each time the collective runs. In a loop over ticks that is once a tick; in an action it is as often
as the tables say that the rank runs the action. Collectives left to the compiler (``auto_axes``)
are not in the traced step. Bytes are of the program's own types; XLA's CPU backend sums 16 bits as
32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import STAGE
from collectives.compat import live
from pipeline.base.tree import nbytes
from pipeline.core.autodiff.jaxpr.primitives import bodies, jaxprs_of, traits
from pipeline.core.autodiff.jaxpr.scopes import ONCE
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.insight.scopes import find_shard_map
from pipeline.insight.scopes import trips as trips_of
from schedules.lowering.needs import without
from schedules.lowering.program import Program

Axes = tuple[str, ...]
Key = tuple[Axes, str]  # mesh axes, and the kind of collective as in HLO
Counts = NDArray[np.float64]  # [S]
PERMUTE = "collective-permute"


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave a rank in a step; each device of the rank sends this number of bytes.

    Attributes:
      sent: [S] bytes, by the mesh axes over which devices meet and by the kind of collective.
      runs: [S] how often the collective runs, by the same keys.
      message: bytes of a message between stages.
      read: [S] number of messages from a rank to other ranks that are read; the rank's other
        messages have no use.
      is_least: whether a collective is in a loop with an unknown number of trips, counted as one.
    """

    sent: Mapping[Key, Counts]
    runs: Mapping[Key, Counts]
    message: int
    read: NDArray[np.int64]
    is_least: bool = False

    def over(self, *axes: str) -> Counts:
        """Return [S] bytes over exactly these axes."""
        found = [sent for (over, _), sent in self.sent.items() if over == axes]
        return np.sum(found, axis=0) if found else np.zeros(len(self.read))


def predict_traffic(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, want_inputs: bool = False
) -> Traffic:
    """Predict the messages of `runtime.train`, which has these arguments, as arrays or types."""
    wanted = {"want_inputs": True} if want_inputs else {}  # the trace of a plain step is reused
    traced = runtime.train.trace(plan, model, weights, batch, **wanted)
    ranks = plan.schedule.num_ranks
    needs = model.trained.needs_gradients(want_inputs=want_inputs)
    program = without(plan.training, [need.x for need in needs])
    walk = _Walk(program, dict(plan.mesh.shape), ranks)
    walk.read(find_shard_map(traced.jaxpr.jaxpr), np.ones(ranks), "", known=False)
    of_axis = list(plan.mesh.axis_names).index
    keys = sorted(walk.sent, key=lambda key: ([*map(of_axis, key[0])], key[1]))
    return Traffic(
        {key: walk.sent[key] for key in keys},
        {key: walk.runs[key] for key in keys},
        walk.message,
        messages_read(program),
        walk.is_least,
    )


def share(kind: str, num_devices: int) -> float:
    """Return the share of a collective's P bytes that each of its devices sends."""
    if kind == PERMUTE:
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (num_devices - 1) / num_devices


def messages_read(program: Program) -> NDArray[np.int64]:
    """Count [S] the messages from each rank to other ranks that are read."""
    found = np.zeros(program.schedule.num_ranks, np.int64)
    arrives = program.arrives.sum(axis=0)  # [slots, S, C]
    for index, slot in enumerate(program.slots):
        for column, channel in enumerate(slot.channels):
            for source, destination in channel.edges if channel.shift else ():
                found[source] += arrives[index, destination, column]
    return found


class _Walk:
    """A walk over a jaxpr that adds up its collectives."""

    def __init__(self, program: Program, sizes: Mapping[str, int], ranks: int) -> None:
        self._program, self._sizes, self._ranks = program, sizes, ranks
        self.sent: dict[Key, Counts] = {}
        self.runs: dict[Key, Counts] = {}
        self.message, self.is_least = 0, False

    def read(self, jaxpr: Any, times: Counts, scope: str, *, known: bool) -> None:
        """Read a body that each rank runs ``times`` times; ``known``: whether the tables say so."""
        # A value that is not read is not computed, such as the last sum of a repeated forward.
        lean, _ = live(jaxpr, keep_inputs=True)
        for eqn in lean.eqns:
            here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            name = eqn.primitive.name
            if traits(eqn).hlo:
                self._collective(eqn, times)
            elif name == "new_ref" and "messages" in here.split("/"):
                aval: Any = eqn.outvars[0].aval
                self.message += nbytes(aval) // aval.shape[0]
            elif name == "while":
                self._loop(eqn, times, here, known=known)
            elif name == "cond":
                branches = [branch.jaxpr for branch in bodies(eqn)]
                self.read(max(branches, key=self._bytes), times, here, known=known)
            else:
                for body in jaxprs_of(eqn):
                    self.read(body, times * eqn.params.get("length", 1), here, known=known)

    def _loop(self, eqn: Any, times: Counts, scope: str, *, known: bool) -> None:
        """Read the body of a ``while`` loop, with the trips that the tables give."""
        (body,) = (body.jaxpr for body in bodies(eqn))
        trips = None if known else trips_of(self._program, scope)
        if trips is not None:
            self.read(body, trips.astype(float), scope, known=True)
            return
        if ONCE not in scope.split("/") and self._bytes(body):
            self.is_least = True
        self.read(body, times, scope, known=known)

    def _bytes(self, body: Any) -> float:
        walk = _Walk(self._program, self._sizes, self._ranks)
        walk.read(body, np.ones(self._ranks), "", known=True)
        return float(sum(sent.sum() for sent in walk.sent.values()))

    def _collective(self, eqn: Any, times: Counts) -> None:
        kind, params = traits(eqn).hlo, eqn.params
        named = params.get("axes", params.get("axis_name"))
        named = named if isinstance(named, tuple) else (named,)
        axes = tuple(axis for axis, size in self._sizes.items() if axis in named and size > 1)
        groups = params.get("axis_index_groups")
        meet = len(groups[0]) if groups else int(np.prod([self._sizes[axis] for axis in axes]))
        if not axes:
            return
        moved = eqn.outvars if kind == "all-gather" else eqn.invars
        each = share(kind, meet) * sum(nbytes(var.aval) for var in moved)
        if kind == PERMUTE:
            times = times * self._sources(params["perm"], axes)
        blank = np.zeros(self._ranks)
        self.sent[axes, kind] = self.sent.get((axes, kind), blank) + each * times
        self.runs[axes, kind] = self.runs.get((axes, kind), blank) + times

    def _sources(self, edges: Any, axes: Axes) -> Counts:
        """Return [S] whether a rank sends; along other axes, the share of devices that send."""
        sources = [source for source, _ in edges]
        if axes == (STAGE,):
            return np.isin(np.arange(self._ranks), sources).astype(float)
        return np.full(self._ranks, len(sources) / self._sizes[axes[0]])
