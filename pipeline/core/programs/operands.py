"""The options and operands of a step; each program gets the operands as one list of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collectives.transfer import typed
from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement.zero import kernel_spec
from pipeline.core.programs.meshes import RankMeshes
from pipeline.core.step.calls.opened import StepInputs
from pipeline.core.step.calls.rank import StepRequest
from pipeline.core.step.ranks import gradient_specs, manual, weight_specs
from schedules.core.schedule import Schedule
from schedules.lowering.program import Op

Argument = tuple[Any, Any]  # the specs within a shard_map, and the types of the arrays


@dataclass(frozen=True, eq=False)
class StepOptions:
    """The static arguments of a step."""

    plan: Plan
    model: Model
    request: StepRequest

    @property
    def schedule(self) -> Schedule:
        schedule = self.plan.schedule
        return schedule if self.request.training else schedule.forward()

    @property
    def keeps_residuals(self) -> bool:
        """Whether F stashes residuals; otherwise the backward repeats F."""
        return self.request.training and self.plan.keep == "residuals"

    def op(self, kind: Any, stage: int) -> Op:
        # The first and the last stage are stages like all others if all ranks share their end.
        stages, shared = self.model.stages, self.plan.shared
        is_first = stage == 0 and "embed" not in shared
        is_last = stage == len(stages) - 1 and "head" not in shared
        return Op(kind, stages[stage].chunk, is_first, is_last)


@dataclass(frozen=True, eq=False)
class Operands:
    """The types of a step's operands (weights, batch and `StepInputs`) as one list of leaves.

    A step passes this list to each of its programs. JAX flattens a list ten times faster than
    states.

    Attributes:
      specs: the specs of the leaves on the pipeline's mesh.
      types: the types of a rank's parts.
      shapes: the shapes of the leaves on the pipeline's mesh.
    """

    options: StepOptions
    meshes: RankMeshes
    tree: Any
    specs: list[P]
    types: list[Any]
    shapes: list[tuple[int, ...]]

    @property
    def manual(self) -> list[P]:
        specs: list[P] = manual(self.options.plan, self.specs)
        return specs

    def sum_specs(self, sums: dict[str, Leaves]) -> dict[str, list[P]]:
        """Return the specs of sums, and of weights made once, between programs.

        If the compiler divides a weight (`auto_axes`), it divides the weight's gradient too, so no
        device has the whole sum. The compiler's axes come after the axes of the shard_map, because
        a shard_map needs contiguous blocks.
        """
        plan, model = self.options.plan, self.options.model
        specs: dict[str, list[P]] = self.meshes.value_specs(sums)
        if not plan.auto_axes:
            return specs
        # A chunk's leaf has a leading rank axis; its sum and a weight made once have none.
        of = {
            f"ready{v}.{n}": [P(*spread.stored[1:])]
            for v, chunk in enumerate(model.layout.chunks)
            for n, spread in enumerate(chunk)
        }
        of |= {f"readyends.{n}": [P(*spread.stored)] for n, spread in enumerate(model.layout.ends)}
        if self.options.request.training:
            chunks, ends = gradient_specs(model)
            of |= {f"chunk{v}": [P(*spec[1:]) for spec in chunk] for v, chunk in enumerate(chunks)}
            of |= {f"ends{n}": [spec] for n, spec in enumerate(ends)}
        for name in specs.keys() & of:
            parts = [kernel_spec(spec, frozenset(plan.auto_axes)) for spec in of[name]]
            pairs = zip(specs[name], parts, strict=True)
            specs[name] = [
                P((*axes_in(lead[0]), *axes_in(part[0] if part else None)), *part[1:])
                for lead, part in pairs
            ]
        return specs

    def sum_types(self, sums: dict[str, Leaves], mesh: Any = None) -> dict[str, list[Any]]:
        """Return the types of sums that enter and leave a program, on ``mesh`` if it is given.

        The sums of all devices are concatenated along their first axis; only a scalar gets a new
        axis, unlike other values (`RankMeshes.value_specs`). So the shape within a program equals
        the shape of its argument, and XLA adds in place; otherwise it copies (CPUs, jaxlib 0.10.2
        and 0.12).
        """
        mesh = self.meshes.abstract if mesh is None else mesh

        def sum_type(t: Any, lead: P, spec: P) -> jax.ShapeDtypeStruct:
            first, *rest = t.shape or (1,)
            count = math.prod(mesh.shape[axis] for axis in axes_in(lead[0]))
            return typed(mesh, (count * first, *rest), t.dtype, spec)

        return jax.tree.map(sum_type, sums, self.meshes.value_specs(sums), self.sum_specs(sums))

    def whole_types(self, mesh: Mesh) -> list[Any]:
        whole = zip(self.shapes, self.types, self.specs, strict=True)
        return [typed(mesh, shape, t.dtype, spec) for shape, t, spec in whole]

    # --- arguments of programs, on the mesh of a rank if ``mesh`` is None ---

    def leaves(self, mesh: Mesh | None = None) -> Argument:
        return self.manual, self.types if mesh is None else self.whole_types(mesh)

    def sums(self, types: dict[str, Leaves], mesh: Mesh | None = None) -> Argument:
        return self.meshes.value_specs(types), self.sum_types(types, mesh)

    def values(self, types: Tree, mesh: Mesh | None = None) -> Argument:
        return self.meshes.value_specs(types), self.meshes.value_types(types, mesh)

    def number(self, mesh: Mesh | None = None) -> Argument:
        """The argument that is a microbatch's number."""
        return P(), typed(mesh or self.meshes.abstract, (), jnp.int32, P())

    def of(self, leaves: list[Any]) -> tuple[Weights, Batch, StepInputs]:
        operands: tuple[Weights, Batch, StepInputs] = jax.tree.unflatten(self.tree, leaves)
        return operands

    def sharded(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Any = None
    ) -> Any:
        """Wrap a body in the shard_map over the devices of a rank, or of ``mesh``."""
        plan = self.options.plan
        return jax.shard_map(
            body,
            mesh=self.meshes.abstract if mesh is None else mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=plan.axes.manual,
            check_vma=plan.tracks_varying,
        )


def find_operands(
    options: StepOptions, weights: Weights, batch: Batch, given: StepInputs
) -> Operands:
    meshes = RankMeshes(options.plan)
    leaves, tree = jax.tree.flatten((weights, batch, given))
    everywhere = jax.tree.map(lambda _: P(), given)
    specs = jax.tree.leaves((weight_specs(options.model, weights), batch.spec_tree(), everywhere))
    shapes = [tuple(x.shape) for x in leaves]
    return Operands(options, meshes, tree, specs, meshes.types(leaves, specs), shapes)
