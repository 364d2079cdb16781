"""From what a user asks for to a plan: options checked, what was left open chosen."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.base.arguments import DataParallel
from pipeline.base.axes import find_axes
from pipeline.base.precision import check_dtype
from pipeline.core.backward.accumulate import check_grad_dtype
from pipeline.core.model.ends import Mode, choose_shared
from pipeline.core.model.loss import LossFn, LossModule
from pipeline.core.options.checks import (
    Bubbles,
    Gather,
    Remat,
    check_axes,
    check_functions,
    check_limit,
    check_microbatches,
    check_options,
)
from pipeline.core.options.choose import (
    choose_bubbles,
    choose_mesh,
    choose_pattern,
    choose_schedule,
    exchanges_are_barriers,
    read,
)
from pipeline.core.options.costs import check_costs, own_costs
from pipeline.core.options.plan import Plan
from pipeline.core.sharding.meshes import default_mesh, with_types_in_force, without_types


def make_plan(
    num_stages: int,
    num_microbatches: int,
    *,
    schedule: Any,
    mesh: Mesh | None,
    embed: Any,
    head: Any,
    loss_fn: LossFn | None,
    remat: Remat,
    bubbles: Bubbles,
    pattern: str | None,
    delayed: bool,
    compute_dtype: Any,
    grad_dtype: Any,
    data_parallel: DataParallel,
    gather: Gather,
    auto_axes: Sequence[str],
    vocabulary: Mode,
    memory_limit: int | None,
    wrt: Any,
    state: Any,
    after_step: Any,
    costs: Any,
    costs_from: str,
    signature: Any,
    options: dict[str, Any],
) -> Plan:
    """The plan of K stages; arguments as of `pipeline.Pipeline`, and what of them is remembered.

    But ``costs`` are no calibration: ``costs_from`` says where they are from, and ``signature`` is
    what a calibration of this pipeline would be of.

    Raises:
      ValueError: options that do not fit each other.
    """
    num_microbatches = check_microbatches(num_microbatches)
    check_options(remat, bubbles)
    memory_limit = check_limit(memory_limit)
    costs = check_costs(costs, num_stages)
    check_functions(loss_fn=loss_fn, embed=embed, head=head)
    mesh = default_mesh() if mesh is None else mesh
    schedule, origin = read(schedule)
    mesh = without_types(choose_mesh(mesh, num_stages, schedule))
    home = with_types_in_force(mesh)
    partners = not exchanges_are_barriers(mesh)
    axes = find_axes(mesh, check_axes(mesh, auto_axes, data_parallel, gather))
    bubbles = choose_bubbles(bubbles, axes.auto, partners=partners)
    pattern = choose_pattern(pattern, bubbles)
    shared = choose_shared(vocabulary, embed, head, loss_fn)
    if mesh.shape[STAGE] == 1:  # alone with all words
        shared = ()
    timetable, why = choose_schedule(
        schedule,
        num_ranks=mesh.shape[STAGE],
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        partners=partners,
        delayed=delayed,
        pattern=pattern,
        costs=own_costs(num_stages, remat) if costs is None else costs,
        shared=shared,
        origin=origin,
    )
    return Plan(
        mesh,
        home,
        axes,
        timetable,
        LossModule() if isinstance(loss_fn, nnx.Module) else loss_fn,
        remat,
        bubbles,
        why,
        pattern,
        partners,
        delayed,
        check_grad_dtype(grad_dtype),
        data_parallel=data_parallel,
        gather=gather,
        compute_dtype=check_dtype("compute_dtype", compute_dtype),
        shared=shared,
        memory_limit=memory_limit,
        wrt=wrt,
        state=state,
        after_step=after_step,
        given_costs=costs,
        costs_from=costs_from,
        signature=signature,
        options=MappingProxyType(options),
    )
