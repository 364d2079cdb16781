"""The end of a step of programs: the results are computed from the sums of ranks.

Ranks that share a mesh run one finish program. With ``stage_meshes`` each rank has its own finish
program. Before these run, the last rank sums numbers to which every rank contributes, such as
losses that stages add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from collectives.transfer import waits
from pipeline.base.tree import Leaves, Tree
from pipeline.core.model.model import Weights
from pipeline.core.placement.distribute import placed_on
from pipeline.core.programs.meshes import drop_device_axis
from pipeline.core.programs.program import entering, without_warnings_of_donation
from pipeline.core.programs.traced import Traced
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.stores.totals import StepSums
from schedules.core.action import KINDS


@dataclass(frozen=True)
class Results:
    """The results of a step.

    Attributes:
      of: a function of (step, sums, state of a rank) that computes the results.
      stages: for each result the stage whose rank holds the result, as a prefix of the result tree;
        used only with ``stage_meshes``.
    """

    of: Callable[[OpenedStep, StepSums, Weights], Any]
    specs: Any
    stages: Any


class JoinedFinish:
    """The program that computes a step's results from the ranks' sums, if ranks share one mesh.

    Args:
      ranks: [S] for each rank the facts from a trace of the model (`Traced`).
    """

    def __init__(self, ranks: Sequence[Traced], results: Results) -> None:
        self._traced, self._operands, self._results = ranks[0], ranks[0].operands, results
        self._waits = waits(ranks[0].options.plan.mesh)

    def lower(self) -> list[jax.stages.Lowered]:
        traced = self._traced
        return [lower_finish(traced, traced.options.plan.mesh, traced.sums, self._results)]

    def compile(self, _: Mapping[tuple[str, int, int], Any]) -> None:
        self._run = self.lower()[0].compile()

    def place(self, leaves: Leaves) -> dict[int | None, Leaves]:
        """Place a step's operands for each local rank, and for None on the pipeline's mesh."""
        meshes, specs = self._operands.meshes, self._operands.specs
        placed: dict[int | None, Leaves] = {None: meshes.placed(leaves, specs)}
        return placed | meshes.split(placed[None], specs)

    def __call__(
        self,
        operands: Mapping[int | None, Leaves],
        sums: Mapping[int, Tree],
        shared: Mapping[int, Tree],
    ) -> Any:
        join = self._operands.meshes.join
        if self._waits:  # so that the launch of this program finds no program in flight
            jax.block_until_ready(sums)
        results = self._run(operands[None], join(sums.values()), join(shared.values()))
        return jax.block_until_ready(results) if self._waits else results


class FinishByRank:
    """One program for each rank that computes results from sums, with ``stage_meshes``.

    Args:
      ranks: [S] for each rank the facts from a trace of the model (`Traced`).
    """

    def __init__(self, ranks: Sequence[Traced], results: Results) -> None:
        traced, self._ranks, self._results = ranks[0], ranks, results
        self._placement = traced.options.schedule.placement
        self._owners = jax.tree.map(lambda stage: self._placement[stage], results.stages)
        # Names of sums to which every rank contributes; and of sums that only the last rank has,
        # and that the gradients of other ranks may need.
        self._common = [name for name in traced.sums if name not in traced.stages_of_sums]
        self._of_last = [name for name in ("loss", "weight") if name in traced.sums]
        self._add = jax.jit(lambda parts: jax.tree.map(lambda *x: sum(x), *parts))

    def lower(self) -> list[jax.stages.Lowered]:
        return [self._lower(rank, self._results) for rank in range(len(self._ranks))]

    def compile(self, compiled: Mapping[tuple[str, int, int], Any]) -> None:
        """Compile the programs; ``compiled`` are the functions of the step."""
        self._finish = {rank: of.compile() for rank, of in enumerate(self.lower())}
        self._shardings = [self._shardings_on(rank) for rank in self._finish]
        self._reads = {rank: self._operands_read(rank, compiled) for rank in self._finish}

    def _lower(self, rank: int, results: Results) -> jax.stages.Lowered:
        """Lower the finish program of a rank, which computes the results that the rank holds."""
        traced = self._ranks[rank]
        sums = traced.sums_on(rank) | {name: traced.sums[name] for name in self._of_last}
        of, specs = results.of, self._only(rank, results.specs)
        own = Results(lambda *given: self._only(rank, of(*given)), specs, rank)
        return lower_finish(traced, traced.operands.meshes.ranks[rank], sums, own)

    def _shardings_on(self, rank: int) -> Any:
        """Return the shardings of sums that this rank receives from other ranks."""
        of = self._ranks[rank]
        sums = {name: of.sums[name] for name in (*self._common, *self._of_last)}
        return of.operands.meshes.shardings(rank, of.operands.sum_specs(sums))

    def _only(self, rank: int, tree: Tree) -> Tree:
        """Return the results' tree with None for leaves that other ranks hold."""
        return jax.tree.map(lambda owner, x: x if owner == rank else None, self._owners, tree)

    def _operands_read(self, rank: int, compiled: Mapping[Any, Any]) -> list[bool]:
        """Tell, for each operand, whether the rank's program reads it; jit drops others."""
        given = [self._finish[rank].input_shardings[0][0]]
        for (kind, where, _), program in compiled.items():
            if kind in ("begin", "gather") and where == rank:
                given.append(program.input_shardings[0][0])
            elif kind in KINDS and self._placement[where] == rank:
                given.append(program.input_shardings[0][4])
        return [any(x is not None for x in of) for of in zip(*given, strict=True)]

    def place(self, leaves: Leaves) -> dict[int | None, Leaves]:
        """Place the operands of each rank; skip operands that the rank's programs do not read."""
        placed: dict[int | None, Leaves] = {}
        for rank, reads in self._reads.items():
            operands = self._ranks[rank].operands
            meshes = operands.meshes
            placed[rank] = [
                placed_on(leaf, meshes.sharding(rank, spec)) if is_read else leaf
                for leaf, spec, is_read in zip(leaves, operands.specs, reads, strict=True)
            ]
        return placed

    def __call__(
        self,
        operands: Mapping[int | None, Leaves],
        sums: Mapping[int, dict[str, Leaves]],
        shared: Mapping[int, Tree],
    ) -> Any:
        last = self._placement[-1]
        common: dict[str, Leaves] = {name: sums[last][name] for name in self._of_last}
        if self._common:
            parts = ({name: of[name] for name in self._common} for of in sums.values())
            common |= self._add([self._sent(part, last) for part in parts])
        # All sums are sent before the first finish, because a finish reuses the memory of its sums.
        given = {rank: of | self._sent(common, rank) for rank, of in sums.items()}
        found = [
            finish(operands[rank], given[rank], shared[rank])
            for rank, finish in self._finish.items()
        ]
        return jax.tree.map(lambda owner, *of: of[owner], self._owners, *found)

    def _sent(self, values: dict[str, Leaves], rank: int) -> Any:
        """Copy sums of another rank to the devices of ``rank``."""
        shardings = {name: self._shardings[rank][name] for name in values}
        return jax.device_put(values, shardings)


def lower_finish(
    traced: Traced, mesh: Mesh, sums: dict[str, Leaves], results: Results
) -> jax.stages.Lowered:
    """Lower the program after the last action.

    Args:
      mesh: the mesh of the pipeline, or with ``stage_meshes`` of a rank.
      sums: the types of the sums that the program takes.
    """
    operands = traced.operands

    def finish(leaves: list[Any], given: Any, shared: Any) -> Any:
        weights, batch, inputs = operands.of(leaves)
        program = traced.open(weights, batch, inputs, drop_device_axis(shared))
        program.put(entering(given, sums))
        return results.of(program.step, program.sums, weights)

    of_values = operands.meshes.value_specs((sums, traced.shared))
    run = operands.sharded(finish, (operands.manual, *of_values), results.specs, mesh)
    shared = operands.meshes.value_types(traced.shared, mesh)
    types = operands.whole_types(mesh), operands.sum_types(sums, mesh), shared
    return without_warnings_of_donation(jax.jit(run, donate_argnums=1).trace(*types).lower)
