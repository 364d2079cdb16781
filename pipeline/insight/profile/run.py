"""`Pipeline.trace`: runs of steps under jax's profiler, and the reading of its profile."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from collectives.places.homes import processes_of
from pipeline.core.options.plan import Plan
from pipeline.core.step import runtime
from pipeline.core.step.operands import Operands
from pipeline.insight.profile.loops import loops_of
from pipeline.insight.profile.read import events, instructions
from pipeline.insight.profile.timeline import report
from schedules import Report, simulate
from schedules.core.arguments import integer

_MODULE = re.compile(r"HloModule ([\w.\-]+)")


def trace(
    plan: Plan, operands: Operands, steps: int, directory: str | os.PathLike[str] | None
) -> Report:
    """Run a step under the profiler.

    Args:
      steps: number of measured steps, after one that is not measured.
      directory: the folder for the profile; None for a temporary folder.

    Raises:
      ValueError: ``steps`` is no positive number, the step has no actions of its own, or the
        profile does not say when actions ran.
    """
    check(plan, steps)
    devices = [[d.local_hardware_id for d in mesh.devices.flat] for mesh in plan.rank_meshes]
    platform = plan.mesh.devices.flat[0].platform
    if plan.engine == "programs":
        from pipeline.insight.profile.programs import read_programs, training_step

        programs, step = training_step(plan, operands)
        profile = profiled(step, steps, directory)
        return read_programs(programs, instructions(profile, platform), devices, steps)
    model, weights, batch = operands
    compiled = runtime.train.lower(plan, model, weights, batch).compile()
    profile = profiled(functools.partial(compiled, weights, batch), steps, directory)
    text = compiled.as_text() or ""
    loops, module = loops_of(text), _MODULE.search(text)
    slots: Any = {"pattern": pattern_of(plan), "partners": plan.partners}
    seen = events(profile, loops, platform, module[1] if module else None)
    return report(plan.training, loops, seen, devices, steps, **slots)


def profiled(
    step: Callable[[], Any], steps: int, directory: str | os.PathLike[str] | None
) -> ProfileData:
    """Run a step once, and then ``steps`` times under the profiler."""
    jax.block_until_ready(step())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's events outnumber all others
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        with jax.profiler.trace(os.fspath(directory), profiler_options=options):
            for _ in range(steps):
                jax.block_until_ready(step())
        found = Path(directory).rglob("*.xplane.pb")
        return ProfileData.from_file(str(max(found, key=lambda path: path.stat().st_mtime)))


def check(plan: Plan, steps: int) -> None:
    """Check that a step's actions can be found in a profile of this process."""
    if (count := integer(steps)) is None or count < 1:
        raise ValueError(f"trace(steps={steps!r}): the number of steps to measure; give 1 or more")
    if plan.is_straight and plan.engine == "scan":
        raise ValueError(
            "trace(): on one rank with remat=None a step is plain accumulation, without a "
            "timetable: no actions to show; trace with remat='stage', or on more ranks"
        )
    processes = processes_of(plan.devices)
    if processes != {jax.process_index()}:
        raise ValueError(
            f"trace(): the mesh spans {len(processes)} processes, and a profile shows the devices "
            f"of one process only; trace a mesh of one process's devices"
        )


def pattern_of(plan: Plan) -> str | None:
    """Return the name of the pattern of slots that run, as the lockstep clock names it."""
    if plan.pattern is not None:
        return plan.pattern
    shared: dict[str, Any] = {"shared": plan.shared, **plan.sends}
    return simulate(plan.schedule, clock="lockstep", **shared).pattern
