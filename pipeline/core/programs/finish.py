"""The end of a step of programs: from the sums of ranks to its results.

Ranks of one mesh share one program. With ``stage_meshes`` each rank has its own. Before these run,
numbers to which every rank contributes, such as losses that stages add, are summed on the last
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from pipeline.base.tree import Leaves, Tree
from pipeline.core.model.model import Weights
from pipeline.core.options.plan import Plan
from pipeline.core.programs.meshes import drop_device_axis, placed_on
from pipeline.core.programs.program import (
    RankModel,
    entering,
    without_warnings_of_donation,
)
from pipeline.core.step.calls.local_model import LocalModel
from pipeline.core.step.stores.totals import StepSums


@dataclass(frozen=True)
class Results:
    """The results of a step.

    Attributes:
      of: a function of (plan, model, sums, state of a rank) that computes the results.
      specs: their specs.
      stages: for each result the stage whose rank holds it, as a prefix of the result tree; used
        only with ``stage_meshes``.
    """

    of: Callable[[Plan, LocalModel, StepSums, Weights], Any]
    specs: Any
    stages: Any


class JoinedFinish:
    """The finish of ranks that share one mesh.

    Args:
      ranks: [S] the model of each rank.
      results: of the step.
    """

    def __init__(self, ranks: Sequence[RankModel], results: Results, _: Any) -> None:
        self._of, mesh = ranks[0], ranks[0].traced.options.plan.mesh
        sums = self._of.traced.sums
        self._run = lower_finish(self._of, mesh, sums, results.of, results.specs).compile()

    def place(self, leaves: Leaves) -> dict[int | None, Leaves]:
        """By rank of this process the operands of a step; under None on the pipeline's mesh."""
        operands = self._of.operands
        placed: dict[int | None, Leaves] = {}
        placed[None] = operands.meshes.placed(leaves, operands.specs)
        return placed | operands.meshes.split(placed[None], operands.specs)

    def __call__(
        self,
        operands: Mapping[int | None, Leaves],
        sums: Mapping[int, Tree],
        factors: Mapping[int, Tree],
    ) -> Any:
        """The results of the step, on the pipeline's mesh."""
        join = self._of.operands.meshes.join
        return self._run(operands[None], join(sums.values()), join(factors.values()))


class FinishByRank:
    """The finish of ranks whose meshes are unlike.

    Args:
      ranks: [S] the model of each rank.
      results: of the step.
      compiled: by key the compiled functions of the step.
    """

    def __init__(
        self, ranks: Sequence[RankModel], results: Results, compiled: Mapping[Any, Any]
    ) -> None:
        options, self._ranks = ranks[0].traced.options, ranks
        placement = options.schedule.placement
        self._owners = jax.tree.map(lambda stage: placement[stage], results.stages)
        self._last = placement[-1]
        # Names of sums of which each rank has an addend; and those that the last rank has alone,
        # on which the gradients of others may depend.
        traced = ranks[0].traced
        self._common = [name for name in traced.sums if name not in traced.stages_of_sums]
        self._of_last = [name for name in ("loss", "weight") if name in traced.sums]
        self._add = jax.jit(lambda parts: jax.tree.map(lambda *x: sum(x), *parts))
        self._finish = {}
        for rank, of in enumerate(ranks):
            sums = of.traced.sums_on(rank)
            sums |= {name: of.traced.sums[name] for name in self._of_last}
            specs = self._only(rank, results.specs)
            run = self._own_results(rank, results.of)
            mesh = of.operands.meshes.ranks[rank]
            self._finish[rank] = lower_finish(of, mesh, sums, run, specs).compile()
        self._reads = {rank: self._operands_read(rank, compiled) for rank in self._finish}

    def _only(self, rank: int, tree: Tree) -> Tree:
        """A tree like the results without what is on other ranks."""
        return jax.tree.map(lambda owner, x: x if owner == rank else None, self._owners, tree)

    def _own_results(self, rank: int, results: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: self._only(rank, results(*given))

    def _operands_read(self, rank: int, compiled: Mapping[Any, Any]) -> list[bool]:
        """For each operand whether a program of the rank reads it; jit drops unused arguments."""
        given = [self._finish[rank].input_shardings[0][0]]
        for key, program in compiled.items():
            if len(key) == 2 and key[1] == rank and hasattr(program, "input_shardings"):
                given.append(program.input_shardings[0][0 if key[0] == "begin" else 3])
        return [any(x is not None for x in of) for of in zip(*given, strict=True)]

    def place(self, leaves: Leaves) -> dict[int | None, Leaves]:
        """Place the operands of each rank; one that its programs do not read is not moved."""
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
        factors: Mapping[int, Tree],
    ) -> Any:
        """The results of the step, each on the mesh of its rank."""
        parts = [self._sent({n: of[n] for n in self._common}, self._last) for of in sums.values()]
        common = self._add(parts) | {name: sums[self._last][name] for name in self._of_last}
        # All are sent before the first finish, which takes the memory of its own.
        given = {rank: of | self._sent(common, rank) for rank, of in sums.items()}
        found = [
            finish(operands[rank], given[rank], factors[rank])
            for rank, finish in self._finish.items()
        ]
        is_none = lambda x: x is None  # noqa: E731
        return jax.tree.map(lambda owner, *of: of[owner], self._owners, *found, is_leaf=is_none)

    def _sent(self, values: dict[str, Leaves], rank: int) -> dict[str, Leaves]:
        """Sums of another rank on the devices of this one."""
        operands, types = self._ranks[rank].operands, self._ranks[rank].traced.sums
        specs = operands.sum_specs({name: types[name] for name in values})
        shardings = jax.tree.map(lambda spec: operands.meshes.sharding(rank, spec), specs)
        return jax.device_put(values, shardings)


def lower_finish(
    of: RankModel,
    mesh: Mesh,
    sums: dict[str, Leaves],
    results: Callable[..., Any],
    out_specs: Any,
) -> jax.stages.Lowered:
    """The program after the last action.

    Args:
      of: the model.
      mesh: of the pipeline, or of a rank that has its own.
      sums: the types of those that are given.
      results: as of `Results`.
      out_specs: the specs of what it makes.
    """
    traced, operands, plan = of.traced, of.operands, of.traced.options.plan

    def finish(leaves: list[Any], given: Any, factors: Any) -> Any:
        weights, batch, _ = operands.of(leaves)
        step = traced.opened(weights, batch, drop_device_axis(factors))
        step.put(entering(given, sums))
        return results(plan, step.inspected.local(), step.sums, weights)

    of_values = operands.meshes.value_specs((sums, traced.factors))
    run = operands.sharded(finish, (operands.manual, *of_values), out_specs, mesh)
    factors = operands.meshes.value_types(traced.factors, mesh)
    types = operands.whole_types(mesh), operands.sum_types(sums, mesh), factors
    return without_warnings_of_donation(jax.jit(run, donate_argnums=1).trace(*types).lower)
