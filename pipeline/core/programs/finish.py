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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.everywhere import everywhere, send_numbers
from collectives.transfer import elsewhere, typed, waits
from pipeline.base.tree import Leaves, Tree
from pipeline.core.model.model import Weights
from pipeline.core.placement.distribute import placed_on
from pipeline.core.programs.meshes import drop_device_axis
from pipeline.core.programs.program import StepProgram, Where, entering
from pipeline.core.programs.traced import Traced
from pipeline.core.step.calls.opened import OpenedStep
from pipeline.core.step.stores.totals import StepSums

Programs = Sequence[tuple[StepProgram, Where]]  # with their ranks


@dataclass(frozen=True)
class Results:
    """The results of a step.

    Attributes:
      of: a function of (step, sums, state of a rank) that computes the results.
      stages: for each result the stage whose rank holds the result, as a prefix of the result tree;
        used only with ``stage_meshes``.
      numbers: whether a result is numbers for all processes, such as a loss; a prefix too.
    """

    of: Callable[[OpenedStep, StepSums, Weights], Any]
    specs: Any
    stages: Any
    numbers: Any


class JoinedFinish:
    """The program that computes a step's results from the ranks' sums, if ranks share one mesh.

    Args:
      ranks: [S] for each rank the facts from a trace of the model (`Traced`).
    """

    def __init__(self, ranks: Sequence[Traced], results: Results) -> None:
        traced, mesh = ranks[0], ranks[0].options.plan.mesh
        self._operands, self._waits = traced.operands, waits(mesh)
        self._finish = finish_program(traced, mesh, traced.sums, results)

    def lower(self) -> list[jax.stages.Lowered]:
        return [self._finish.lower_on(None)]

    def compile(self, _: Programs) -> None:
        self._run = self._finish.compile()

    def place(self, leaves: Leaves) -> dict[Where, Leaves]:
        """Place a step's operands for each local rank, and for None on the pipeline's mesh."""
        meshes, specs = self._operands.meshes, self._operands.specs
        placed: dict[Where, Leaves] = {None: meshes.placed(leaves, specs)}
        return placed | meshes.split(placed[None], specs)

    def __call__(
        self,
        operands: Mapping[Where, Leaves],
        sums: Mapping[Where, Tree],
        shared: Mapping[Where, Tree],
    ) -> Any:
        join = self._operands.meshes.join
        if self._waits:  # so that the launch of this program finds no program in flight
            jax.block_until_ready([*sums.values()])
        of_ranks = (of for rank, of in sums.items() if rank is not None)
        taken = [operands[None][n] for n in self._finish.reads]
        results = self._run(taken, join(of_ranks) | sums[None], shared[None])
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
        names = *self._common, *self._of_last
        self._add = jax.jit(lambda parts: jax.tree.map(lambda *x: sum(x), *parts))
        self._meshes, self._devices = traced.operands.meshes, traced.options.plan.devices
        self._is_several = traced.options.plan.has_meshes_elsewhere
        self._waits = [waits(mesh) for mesh in self._meshes.ranks]
        # By rank, the types of the sums that it sends and receives.
        self._types = [
            of.operands.sum_types({name: of.sums[name] for name in names}, mesh)
            for of, mesh in zip(ranks, self._meshes.ranks, strict=True)
        ]

    def lower(self) -> list[jax.stages.Lowered]:
        return [self._program(rank).lower_on(None) for rank in range(len(self._ranks))]

    def compile(self, programs: Programs) -> None:
        """Compile the programs of this process; ``programs`` are those of the step."""
        local = self._meshes.local_ranks
        self._programs = {rank: self._program(rank) for rank in local}
        self._finish = {rank: self._programs[rank].compile() for rank in local}
        # By rank, the operands that a program of the rank reads.
        self._reads = {rank: set(self._programs[rank].reads) for rank in local}
        for program, where in programs:
            if where is not None:
                self._reads[where] |= set(program.reads)
        others = [rank for rank in range(len(self._ranks)) if rank not in self._finish]
        self._sums_elsewhere = {rank: jax.tree.map(elsewhere, self._types[rank]) for rank in others}
        self._results_elsewhere = {rank: self._list_elsewhere(rank) for rank in others}

    def _list_elsewhere(self, rank: int) -> Any:
        """Make the results of a rank of other processes, without their parts."""
        specs, mesh = self._only(rank, self._results.specs), self._meshes.ranks[rank]

        def result(spec: P, types: Any) -> Any:
            return jax.tree.map(lambda t: elsewhere(typed(mesh, t.shape, t.dtype, spec)), types)

        return jax.tree.map(result, specs, self._program(rank).lower_on(None).out_info)

    def _program(self, rank: int) -> StepProgram:
        """Make the finish program of a rank, which computes the results that the rank holds."""
        traced = self._ranks[rank]
        sums = traced.sums_on(rank) | {name: traced.sums[name] for name in self._of_last}
        of, specs = self._results.of, self._only(rank, self._results.specs)
        own = Results(lambda *given: self._only(rank, of(*given)), specs, rank, False)
        return finish_program(traced, traced.operands.meshes.ranks[rank], sums, own)

    def _only(self, rank: int, tree: Tree) -> Tree:
        """Return the results' tree with None for leaves that other ranks hold."""
        return jax.tree.map(lambda owner, x: x if owner == rank else None, self._owners, tree)

    def place(self, leaves: Leaves) -> dict[Where, Leaves]:
        """Place the operands of each rank; skip operands that the rank's programs do not read."""
        placed: dict[Where, Leaves] = {}
        for rank, reads in self._reads.items():
            operands = self._ranks[rank].operands
            meshes = operands.meshes
            placed[rank] = [
                _placed(leaf, meshes.sharding(rank, spec)) if n in reads else leaf
                for n, (leaf, spec) in enumerate(zip(leaves, operands.specs, strict=True))
            ]
        return placed

    def __call__(
        self,
        operands: Mapping[Where, Leaves],
        sums: Mapping[Where, dict[str, Leaves]],
        shared: Mapping[Where, Tree],
    ) -> Any:
        last, ranks = self._placement[-1], range(len(self._ranks))
        of_ranks: Any = self._sums_elsewhere | {**sums}
        common: dict[str, Leaves] = {name: of_ranks[last][name] for name in self._of_last}
        if self._common:
            parts = [{name: of_ranks[rank][name] for name in self._common} for rank in ranks]
            parts = self._sent(parts, [last] * len(ranks))
            common |= self._add(parts) if last in self._finish else parts[last]
        # All sums are sent before the first finish, because a finish reuses the memory of its sums.
        given = self._sent([common] * len(ranks), ranks)
        results = dict(self._results_elsewhere)
        for rank, finish in self._finish.items():
            taken = [operands[rank][n] for n in self._programs[rank].reads]
            results[rank] = finish(taken, of_ranks[rank] | given[rank], shared[rank])
            if self._waits[rank]:
                jax.block_until_ready(results[rank])
        of_owners = [results[rank] for rank in ranks]
        whole = jax.tree.map(lambda owner, *of: of[owner], self._owners, *of_owners)
        return self._with_numbers(whole) if self._is_several else whole

    def _sent(self, parts: Sequence[dict[str, Leaves]], ranks: Sequence[int]) -> Any:
        """Copy sums to the devices of ranks."""
        leaves, tree = jax.tree.flatten(list(parts))
        pairs = zip(parts, ranks, strict=True)
        to = [{name: self._types[rank][name] for name in of} for of, rank in pairs]
        shardings = [t.sharding for t in jax.tree.leaves(to)]
        return jax.tree.unflatten(tree, send_numbers(leaves, shardings, self._devices))

    def _with_numbers(self, results: Any) -> Any:
        """Copy those results that are numbers to all devices, so that each process has them."""
        flags = jax.tree.map(
            lambda yes, of: jax.tree.map(lambda _: yes, of), self._results.numbers, results
        )
        leaves, tree = jax.tree.flatten(results)
        places = [n for n, yes in enumerate(jax.tree.leaves(flags)) if yes]
        to = [everywhere(self._devices)] * len(places)
        numbers = send_numbers([leaves[n] for n in places], to, self._devices)
        for n, x in zip(places, numbers, strict=True):
            leaves[n] = x
        return jax.tree.unflatten(tree, leaves)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Place an operand for a rank; refuse parts of a batch that other ranks have."""
    on = getattr(leaf, "sharding", None)  # None: a numpy array, which every process has
    if on is not None and not on.is_fully_addressable:
        is_whole = on.is_fully_replicated and on.device_set >= sharding.device_set
        if not is_whole and on.device_set != sharding.device_set:
            raise ValueError(
                f"an array of shape {leaf.shape} is on devices of other processes, and with "
                f"stage_meshes= each rank takes its part of a batch from an array that its process "
                f"has whole: give inputs, targets and extras as numpy arrays"
            )
    return placed_on(leaf, sharding)


def finish_program(
    traced: Traced, mesh: Mesh, sums: dict[str, Leaves], results: Results
) -> StepProgram:
    """Make the program after the last action, from (operands, sums, `Traced.shared`) to results.

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

    shared = operands.values(traced.shared, mesh)
    arguments = [operands.leaves(mesh), operands.sums(sums, mesh), shared]
    return StepProgram(operands, finish, arguments, results.specs, None, donated=(1,), mesh=mesh)
