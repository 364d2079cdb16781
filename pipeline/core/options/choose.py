"""The choice of mesh and schedule for a pipeline, when the user leaves either open.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from collectives import STAGE, check_mesh, make_mesh
from schedules.build import build, names, options, stages_per_rank, takes_slices
from schedules.clocks.shared import Shared, keep_together
from schedules.core.action import ScheduleError
from schedules.core.check import check
from schedules.core.costs import Costs
from schedules.core.schedule import Schedule
from schedules.families import SLICED
from schedules.families.accumulation import accumulation
from schedules.families.constructions.sizes import StagesPerRankError

SAME = 1 + 1e-9  # makespans with a ratio below this differ only by rounding


def choose_mesh(mesh: Mesh | None, num_stages: int, schedule: Any) -> Mesh:
    """Check the user's mesh; without one, make a mesh of the most devices that divide K.

    If a schedule fixes the number of stages per rank, that number decides the number of ranks.

    Raises:
      ValueError: the mesh has no ``stage`` axis, or K is not a multiple of its size.
    """
    if mesh is None:
        if isinstance(schedule, Schedule):
            return make_mesh(stage=schedule.num_ranks)
        return make_mesh(stage=default_ranks(num_stages, len(jax.devices()), schedule))
    check_mesh(mesh)
    ranks = mesh.shape[STAGE]
    if num_stages % ranks:
        near = [k for k in (num_stages // ranks * ranks, -(-num_stages // ranks) * ranks) if k]
        raise ValueError(
            f"stages has {num_stages} stages, which the mesh's {ranks} ranks on axis 'stage' "
            f"cannot share equally; use {' or '.join(map(str, near))} stages, or a stage axis "
            f"whose size divides {num_stages}; stages need not be alike, so one may hold more "
            f"layers than another"
        )
    return mesh


def default_ranks(num_stages: int, devices: int, schedule: Any) -> int:
    each = stages_per_rank(schedule) if isinstance(schedule, str) else None
    if each is not None and num_stages % each == 0 and num_stages // each <= devices:
        return num_stages // each
    return max(s for s in range(1, devices + 1) if num_stages % s == 0)


def read(schedule: Any) -> tuple[Any, str]:
    """Read the schedule's file, if the schedule is a path; also return the schedule's origin."""
    if is_path(schedule):
        return Schedule.from_csv(schedule), f"read from {os.fspath(schedule)}"
    return schedule, "given as a Schedule"


def exchanges_are_barriers(mesh: Mesh) -> bool:
    """Tell whether an exchange makes all ranks wait, not only the two ranks that exchange.

    Virtual CPU devices of one process all wait at every collective. Processes, GPUs and TPUs send
    to their partners and receive from them.
    """
    homes = {(device.platform, device.process_index) for device in mesh.devices.flat}
    return len(homes) == 1 and {platform for platform, _ in homes} == {"cpu"}


def check_compiler_axes(mesh: Mesh, auto_axes: Sequence[str]) -> None:
    """Check that the scan's branches can hold the exchanges that a compiler adds to a stage.

    Raises:
      ValueError: all devices wait in each exchange, but ranks take different branches.
    """
    divided = [axis for axis in auto_axes if mesh.shape[axis] > 1]
    if not divided or mesh.shape[STAGE] == 1 or not exchanges_are_barriers(mesh):
        return
    sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in (STAGE, *divided))
    raise ValueError(
        f"auto_axes={tuple(auto_axes)!r} with engine='scan' on virtual CPU devices of one process "
        f"({sizes}): all of them meet in every exchange that the compiler adds to a stage, and "
        f"ranks of other stages, which run other actions meanwhile, would not come; use "
        f"engine='programs', or GPUs, TPUs or several processes"
    )


def choose_schedule(
    schedule: Any,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    engine: str = "scan",
    partners: bool = False,
    delayed: bool = False,
    pattern: str | None = None,
    costs: Costs | None = None,
    shared: Shared = (),
    slices: int | None = None,
    origin: str = "given as a Schedule",
) -> tuple[Schedule, str]:
    """Choose the schedule to run; also return the reason.

    Args:
      schedule: the user's schedule, or None; `read` has replaced a path by its timetable.
      engine: "scan" runs in lockstep, "programs" by the event clock.
      partners: whether only the partners of an exchange wait for it, not all ranks.
      delayed: whether an exchange runs during the work of the next slot.
      pattern: the slots of a tick, or None for the fastest.
      costs: durations, for the default and for schedules that are built from durations.
      shared: which of embed and head all ranks share.
      origin: the reason to return for a `Schedule`.

    Raises:
      ScheduleError: an unknown name, an illegal timetable, or a timetable for other sizes.
    """
    sizes: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
    }
    if schedule is None and slices is not None and slices > 1:
        sliced = build(next(iter(SLICED)), **sizes, num_slices=slices)
        return sliced, "the default for slices of sequences"
    if schedule is None and num_ranks == 1:
        alone = accumulation(num_stages, num_microbatches)
        return alone, "the default on one rank: a microbatch goes through all stages and back"
    _check_slices(schedule, slices)
    clock: dict[str, Any] = {"clock": "event"}
    if engine == "scan":
        slots = {"partners": partners, "delayed": delayed, "pattern": pattern}
        clock = {"clock": "lockstep", **slots}
    if schedule is None:
        if shared:
            costs = keep_together(costs or Costs(), shared)
        return _default(sizes, costs, clock | {"shared": shared})
    if isinstance(schedule, Schedule):
        return _fitting(check(schedule), sizes), origin
    if isinstance(schedule, str) and schedule == "auto":
        if costs is not None and shared:  # work that all ranks share is no part of any stage
            costs = replace(costs, embed=0.0, head=0.0)
        from schedules.search.auto import auto

        search = auto(**sizes, costs=costs, **clock)
        return replace(search.schedule, name=schedule), f"the fastest found: {search.won}"
    if isinstance(schedule, str):
        return _build(schedule, sizes, costs, slices), "asked for by name"
    raise ScheduleError(
        f"schedule={schedule!r} is of type {type(schedule).__name__}; give a name out of "
        f"{', '.join(names())}, a Schedule, or the path of a CSV timetable"
    )


def _build(name: str, sizes: dict[str, Any], costs: Costs | None, slices: int | None) -> Schedule:
    more: dict[str, Any] = {"costs": costs} if "costs" in options(name) else {}
    if takes_slices(name):
        more = {"num_slices": slices}
    try:
        return build(name, **sizes, **more)
    except StagesPerRankError as error:
        advice = _other_mesh(sizes["num_stages"], error.count)
        raise ScheduleError(f"{error}; {advice}") from None


def _check_slices(schedule: Any, slices: int | None) -> None:
    """Raise ScheduleError if ``slices`` does not fit the schedule."""
    if isinstance(schedule, Schedule):
        if slices is not None and schedule.num_slices != slices:
            raise ScheduleError(
                f"slices={slices} with schedule {schedule.name!r} of {schedule.num_slices} slices; "
                f"give slices={schedule.num_slices}, or leave it out"
            )
    elif takes_slices(schedule) and slices is None:
        raise ScheduleError(
            f"schedule={schedule!r} without slices=: it cuts every sequence into slices; give "
            f"slices=2 or more, or choose one of schedules.names() for whole sequences"
        )
    elif isinstance(schedule, str) and not takes_slices(schedule) and (slices or 1) > 1:
        raise ScheduleError(
            f"slices={slices} with schedule={schedule!r}: this schedule runs whole sequences; "
            f"leave slices out, or choose {' or '.join(map(repr, SLICED))}"
        )


def _other_mesh(num_stages: int, each: int) -> str:
    """Advise which mesh a schedule with ``each`` stages per rank needs for K stages."""
    text, ranks = "num_ranks is the size of the mesh's axis 'stage'", num_stages // each
    if num_stages % each:
        return f"{text}, and {num_stages} stages are no multiple of {each}"
    if ranks > (devices := len(jax.devices())):
        return f"{text}, and there are {devices} devices"
    return f"{text}: with mesh=make_mesh(stage={ranks}) these {num_stages} stages fit"


def _default(
    sizes: dict[str, Any],
    costs: Costs | None,
    clock: dict[str, Any],
    barriers: str = "eager_1f1b",
    joined: str = "1f1b",
) -> tuple[Schedule, str]:
    """Choose the default: ``barriers`` or ``joined``, by their simulated makespans."""
    from schedules.clocks.simulate import simulate

    eager, frugal = build(barriers, **sizes), build(joined, **sizes)
    slots, is_event = [clock], clock["clock"] == "event"
    are_barriers = not is_event and not clock["partners"]
    if are_barriers and clock["pattern"] is None:
        # Compare only in patterns that all ranks share. In partner ticks the frugal schedule is no
        # slower on two ranks, but the default must not depend on the number of ranks.
        slots = [clock | {"pattern": name} for name in ("single", "paired")]
    spans = [
        min(simulate(timetable, costs, **of_tick).makespan for of_tick in slots)
        for timetable in (frugal, eager)
    ]
    if are_barriers:
        if spans[1] <= spans[0]:
            why = "its paired ticks lose nothing where every exchange is a barrier"
            return eager, f"the default: {why}"
        return frugal, f"the default: faster than {eager.name}, though every exchange is a barrier"
    here, where = "", "where an action waits for its data alone"
    if not is_event:
        here = "in ticks of this kind, also "
        where = "where an exchange keeps only those ranks that it joins"
    if spans[0] <= spans[1] * SAME:
        return frugal, f"the default: no slower than {eager.name} {where}, and holds less"
    return eager, f"the default: faster than {frugal.name} {here}{where}"


def is_path(schedule: Any) -> bool:
    if not isinstance(schedule, str):
        return isinstance(schedule, os.PathLike)
    return schedule not in names() and (
        schedule.endswith(".csv") or os.sep in schedule or "/" in schedule
    )


def _fitting(schedule: Schedule, sizes: dict[str, int]) -> Schedule:
    """Return the schedule; raise ScheduleError if it does not fit.

    It does not fit if its sizes differ from the pipeline's, or if it has no backward action.
    """
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
