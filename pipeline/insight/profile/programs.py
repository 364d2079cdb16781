"""The actions of a step of programs (``engine="programs"``), found in a profile.

A device runs one program after the other, in the order in which its process calls them. A profile
names the program of each instruction. So the instructions, in order of time, are split into calls
where the program changes. Calls of one program in a row are split at an instruction that each call
runs equally often.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pipeline.core.options.plan import Plan
from pipeline.core.programs.run import StepPrograms
from pipeline.core.programs.runtime import training_programs
from pipeline.core.step.calls.opened import StepInputs
from pipeline.core.step.operands import Operands
from pipeline.insight.profile.read import Instruction
from pipeline.insight.profile.timeline import Interval, Key, report_runs
from schedules.clocks.report import Report
from schedules.lowering.dispatch import Dispatch, Joint, Send

Call = tuple[str, Key | None]  # the name of a program, and the action or shared work that it runs


def training_step(plan: Plan, operands: Operands) -> tuple[StepPrograms, Callable[[], Any]]:
    """Return the programs of a training step, and a function that runs the step."""
    model, weights, batch = operands
    programs = training_programs(plan, model, weights, batch)
    return programs, functools.partial(programs, weights, batch, StepInputs())


def read_programs(
    programs: StepPrograms,
    seen: Iterable[tuple[int, Instruction]],
    devices: Sequence[Sequence[int]],
    steps: int,
) -> Report:
    """Time each action of each rank, in seconds: the median over steps and over a rank's devices.

    Args:
      seen: the instructions that devices ran in all steps.

    Raises:
      ValueError: the profile shows other programs than these steps have.
    """
    by: dict[int, list[Instruction]] = defaultdict(list)
    for device, instruction in seen:
        by[device].append(instruction)
    runs = []
    for rank, held in enumerate(devices):
        wanted = list(calls(programs, rank))
        runs.append([_runs(by[device], wanted, steps, device) for device in held])
    shared = programs.ranks[0].options.plan.shared
    slots = {"pattern": None, "partners": False, "delayed": False, "shared": shared}
    return report_runs(programs.schedule, runs, steps, slots)


def calls(programs: StepPrograms, rank: int) -> Iterator[Call]:
    """List the calls of a rank in a step: what begins the step, actions, and work of all ranks."""
    if programs.ratio is not None:  # forward actions, for a loss that the step needs before it runs
        yield from ((name, None) for name, _ in calls(programs.ratio, rank))
    yield "jit_begin", None
    for n, one in enumerate(programs.order):
        if not isinstance(one, Send) and rank in one.ranks:
            program, _ = programs.programs[programs.name_of(one)]
            key: Key | None = one.action if isinstance(one, Dispatch) else None
            if isinstance(one, Joint):
                key = n, 0, one.part
            yield f"jit_{program.body.__name__}", key


def _runs(
    found: Iterable[Instruction], wanted: list[Call], steps: int, device: int
) -> list[dict[Key, Interval]]:
    """Return, for each step, when a device ran which action."""
    names = {name for name, _ in wanted}
    mine = sorted(one for one in found if one.module in names)
    groups = [list(group) for _, group in itertools.groupby(mine, lambda one: one.module)]
    each = [list(group) for _, group in itertools.groupby(wanted * steps, lambda call: call[0])]
    if [group[0].module for group in groups] != [group[0][0] for group in each]:
        raise ValueError(
            f"the profile has {len(groups)} turns of programs on device {device}, and {steps} "
            f"steps of this pipeline have {len(each)}: it is of another pipeline, or events were "
            f"lost; trace fewer steps, of this pipeline alone"
        )
    intervals: list[Interval] = []
    for group, named in zip(groups, each, strict=True):
        intervals += _split(group, len(named), device)
    runs: list[dict[Key, Interval]] = [{} for _ in range(steps)]
    for n, ((_, key), interval) in enumerate(zip(wanted * steps, intervals, strict=True)):
        if key is not None:
            runs[n // len(wanted)][key] = interval
    return runs


def _split(group: Sequence[Instruction], count: int, device: int) -> list[Interval]:
    """Split the instructions of calls of one program; return when each call began and ended."""
    times = Counter(one.name for one in group)
    mark = next((one.name for one in group if times[one.name] % count == 0), None)
    if mark is None:
        raise ValueError(
            f"the profile shows {group[0].module!r} on device {device} without an instruction that "
            f"each of its {count} calls has equally often: events were lost; trace fewer steps"
        )
    begins = [n for n, one in enumerate(group) if one.name == mark][:: times[mark] // count]
    cuts = [0, *begins[1:], len(group)]
    parts = [group[start:stop] for start, stop in itertools.pairwise(cuts)]
    return [(part[0].start, max(one.end for one in part)) for part in parts]
