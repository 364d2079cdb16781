"""Which mesh and which schedule a pipeline runs, when the user leaves either open.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.sharding import Mesh

from collectives import STAGE, check_mesh, make_mesh
from schedules import Schedule, ScheduleError, build, check, names


def choose_mesh(mesh: Mesh | None, num_stages: int, schedule: Any) -> Mesh:
    """The user's mesh, checked; or as many devices as K stages can share equally.

    Raises:
      ValueError: no ``stage`` axis, or K is not a multiple of its size.
    """
    if mesh is None:
        if _is_path(schedule):
            schedule = Schedule.from_csv(schedule)
        if isinstance(schedule, Schedule):
            return make_mesh(stage=schedule.num_ranks)
        devices = len(jax.devices())
        return make_mesh(stage=max(s for s in range(1, devices + 1) if num_stages % s == 0))
    check_mesh(mesh)
    ranks = mesh.shape[STAGE]
    if num_stages % ranks:
        near = [k for k in (num_stages // ranks * ranks, -(-num_stages // ranks) * ranks) if k]
        raise ValueError(
            f"stages has {num_stages} stages, which the mesh's {ranks} ranks on axis 'stage' "
            f"cannot share equally; use {' or '.join(map(str, near))} stages, or a stage axis "
            f"whose size divides {num_stages}"
        )
    return mesh


def choose_schedule(
    schedule: Any,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    default: str = "eager_1f1b",
) -> tuple[Schedule, str]:
    """The schedule to run, and why.

    Raises:
      ScheduleError: unknown name, unreadable or illegal timetable, or one made for other sizes.
    """
    sizes: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
    }
    if schedule is None:
        built = build(default, **sizes)
        return built, (
            "the default: its paired ticks lose nothing where every exchange is a barrier"
        )
    if isinstance(schedule, Schedule):
        return _fitting(check(schedule), sizes), "given as a Schedule"
    if _is_path(schedule):
        return _fitting(Schedule.from_csv(schedule), sizes), f"read from {os.fspath(schedule)}"
    if isinstance(schedule, str):
        return build(schedule, **sizes), "asked for by name"
    raise ScheduleError(
        f"schedule={schedule!r} is of type {type(schedule).__name__}; give a name out of "
        f"{', '.join(names())}, a Schedule, or the path of a CSV timetable"
    )


def _is_path(schedule: Any) -> bool:
    if not isinstance(schedule, str):
        return isinstance(schedule, os.PathLike)
    return schedule not in names() and (
        schedule.endswith(".csv") or os.sep in schedule or "/" in schedule
    )


def _fitting(schedule: Schedule, sizes: dict[str, int]) -> Schedule:
    """The schedule, if it was made for these sizes."""
    wrong = [
        f"{name}={getattr(schedule, name)} against the pipeline's {want}"
        for name, want in sizes.items()
        if getattr(schedule, name) != want
    ]
    if wrong:
        raise ScheduleError(
            f"schedule {schedule.name!r} does not fit: {', '.join(wrong)}; build it for the "
            f"pipeline's sizes, or change stages, num_microbatches or mesh"
        )
    if schedule.is_forward:
        raise ScheduleError(
            f"schedule {schedule.name!r} has no backward action; a pipeline trains, so give a "
            f"timetable with B, or I and W, for every stage and microbatch"
        )
    return schedule
