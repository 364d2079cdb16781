"""Options to a plan: options that the user left open are chosen for the mesh and the stages."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.base.axes import find_axes
from pipeline.base.precision import check_dtype
from pipeline.core.autodiff.accumulate import check_grad_dtype
from pipeline.core.model.ends import choose_shared
from pipeline.core.model.loss import LossFn, LossModule
from pipeline.core.model.trained_state import check_order
from pipeline.core.options.checks import (
    check_axes_of,
    check_costs,
    check_host,
    check_sliced,
)
from pipeline.core.options.choose import (
    check_compiler_axes,
    choose_mesh,
    choose_schedule,
    exchanges_are_barriers,
    read,
)
from pipeline.core.options.options import Options
from pipeline.core.options.plan import Plan, own_costs
from pipeline.core.placement.meshes import default_mesh, with_types_in_force, without_types
from pipeline.core.placement.stage_meshes import axes_of, first_of
from schedules.build import rebuilt
from schedules.clocks.shared import Shared
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule


def make_plan(
    options: Options,
    num_stages: int,
    *,
    embed: Any,
    head: Any,
    loss_fn: LossFn | None,
    costs: Costs | None,
    **others: Any,
) -> Plan:
    """Make the plan of a pipeline with K stages.

    Args:
      embed: the user's embed, or its types.
      head: the user's head, or its types.
      loss_fn: the user's loss, or its types.
      costs: the durations in ``options.costs``, which may be the result of a calibration.
      others: the fields of `Plan` that say where the model and the engine come from: costs_from,
        signature, lint, entries, stack.

    Raises:
      ValueError: options that do not fit the mesh or the stages.
    """
    costs = check_costs(costs, num_stages)
    # The mesh first: the rest depends on its ranks and on how they exchange messages.
    schedule_and_origin = read(options.schedule)
    mesh = _mesh(options, num_stages, schedule_and_origin[0])
    partners = not exchanges_are_barriers(mesh)
    axes = find_axes(mesh, options.batch, check_axes_of(mesh, tuple(options.auto_axes)))
    if options.engine == "scan":
        check_compiler_axes(mesh, axes.auto)
    shared = choose_shared(options.vocabulary, embed, head, loss_fn)
    ranks = len(options.stage_meshes or range(mesh.shape[STAGE]))
    if ranks == 1:  # one rank holds the whole vocabulary
        shared = ()
    chosen: dict[str, Any] = {"partners": partners, "costs": costs, "shared": shared}
    timetable, why = _timetable(options, ranks, num_stages, schedule_and_origin, **chosen)
    gathers = options.engine == "programs" and options.data_parallel == "fsdp"
    if options.stage_meshes is not None:
        mesh = options.stage_meshes[timetable.placement[-1]]
        axes = axes_of(axes, options.stage_meshes)[timetable.placement[-1]]
    chosen |= {
        "mesh": mesh,
        "schedule": timetable,
        "why": why,
        "home": mesh if options.stage_meshes else with_types_in_force(mesh),
        "axes": axes,
        "compute_dtype": check_dtype("compute_dtype", options.compute_dtype),
        "grad_dtype": check_grad_dtype(options.grad_dtype),
        "loss_fn": LossModule() if isinstance(loss_fn, nnx.Module) else loss_fn,
        "gather": options.gather or ("action" if gathers else "step"),
        "options": options,
    }
    plan = Plan(**(options.to_dict() | chosen | others))
    _check_timetable(plan)
    return plan


def _mesh(options: Options, num_stages: int, schedule: Any) -> Mesh:
    """Return the user's mesh or the chosen one; with ``stage_meshes`` the first rank's mesh."""
    if options.stage_meshes is not None:
        return first_of(options.stage_meshes, num_stages)
    mesh = default_mesh() if options.mesh is None else options.mesh
    return without_types(choose_mesh(mesh, num_stages, schedule))


def _check_timetable(plan: Plan) -> None:
    """Raise ValueError for options that the timetable or the engine does not support."""
    num_slices = plan.schedule.num_slices
    if plan.engine == "programs":
        _check_programs(plan.options, plan.shared)
    check_host(plan.offload, plan.mesh, plan.schedule)
    check_sliced(num_slices, plan.slices, offload=plan.offload, vocabulary=plan.vocabulary)


def _check_programs(options: Options, shared: Shared) -> None:
    """Raise ValueError for an option that ``engine="programs"`` does not support."""
    only_of_scan = {"pattern": options.pattern is not None, "delayed": bool(options.delayed)}
    for name, is_used in only_of_scan.items():
        if is_used:
            raise ValueError(
                f"engine='programs' does not support {name}={getattr(options, name)!r}: it "
                f"describes exchanges in which all ranks keep step, and a rank of programs waits "
                f"only for its data; leave it out, or use engine='scan'"
            )
    if shared and options.stage_meshes is not None:
        raise ValueError(
            "vocabulary='stage' with stage_meshes=: all ranks run embed or head together, as one "
            "program, and a program runs on one mesh; give mesh=, or use vocabulary='ends'"
        )


def with_microbatches(plan: Plan, num_microbatches: int | None) -> Plan:
    """Return a pipeline's plan for another M, with a timetable of its own; None keeps the plan.

    Raises:
      ValueError: M is no integer >= 1; or the user's timetable is for another M, and no family's;
        or the timetable for M places stages otherwise.
    """
    if num_microbatches is None or num_microbatches == plan.options.num_microbatches:
        return plan
    known: dict[int, Plan] = plan.compiled.plans
    if num_microbatches in known:
        return known[num_microbatches]
    options = dataclasses.replace(plan.options, num_microbatches=num_microbatches)
    names = "partners", "costs", "shared"
    chosen: dict[str, Any] = {name: getattr(plan, name) for name in names}
    schedule, origin = read(options.schedule)
    if isinstance(schedule, Schedule):
        schedule = rebuilt(schedule, options.num_microbatches)
    of_model = plan.schedule.num_ranks, plan.schedule.num_stages
    timetable, why = _timetable(options, *of_model, (schedule, origin), **chosen)
    if timetable.stages_of != plan.schedule.stages_of:
        raise ValueError(
            f"num_microbatches={num_microbatches} of a call: the schedule that is chosen "
            f"for it, {timetable.name!r}, places stages otherwise; name a schedule, or "
            f"use pipe.replace(num_microbatches={num_microbatches})"
        )
    if plan.state is not None:
        check_order(timetable)
    sizes: dict[str, Any] = {"num_microbatches": options.num_microbatches, "options": options}
    known[num_microbatches] = dataclasses.replace(plan, schedule=timetable, why=why, **sizes)
    return known[num_microbatches]


def _timetable(
    options: Options,
    num_ranks: int,
    num_stages: int,
    schedule_and_origin: tuple[Any, str],
    *,
    partners: bool,
    costs: Costs | None,
    shared: Shared,
) -> tuple[Schedule, str]:
    """Return the user's timetable or the chosen one, with the reason."""
    schedule, origin = schedule_and_origin
    slices: Any = options.slices
    return choose_schedule(
        schedule,
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=options.num_microbatches,
        engine=options.engine,
        partners=partners,
        delayed=options.delayed,
        pattern=options.pattern,
        costs=costs or own_costs(num_stages, options.remat, shared, options.state),
        shared=shared,
        slices=len(slices) if isinstance(slices, tuple) else slices,
        origin=origin,
    )
