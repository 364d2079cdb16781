"""What a profile says of a step: when each rank ran which action.

An action is a loop of at most one trip (`pipeline.kernel.scopes`), and the compiled step says which
loop is which action's. A rank comes to it once a tick and the program's table says at which ticks
it makes the trip, so the n-th time that a device comes to a loop is known by its number alone.
XLA shows a loop in one of two ways. On CPUs and TPUs as one event, from its beginning to its end.
On GPUs as the fetches of its condition to the host, one at every tick and one after every trip: the
trip lies between the two.

Letters: S ranks. Times are nanoseconds until they are in a report, there seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData
from numpy.typing import NDArray

from collectives import STAGE
from pipeline.kernel import runtime
from pipeline.kernel.operands import Operands
from pipeline.kernel.scopes import Place, place_of_loop
from pipeline.options.plan import Plan
from schedules import Action, Costs, Report, simulate
from schedules.core.action import KINDS
from schedules.core.arguments import integer
from schedules.core.flat import flatten
from schedules.lowering.program import Program
from schedules.report import sum_up

SECOND = 1e9
NAMES = {"cpu": "/host:CPU", "gpu": "/device:GPU:", "tpu": "/device:TPU:"}
_BEGIN = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")  # of a computation
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?([^,{}\s]+)")
_CALL = re.compile(r" call\(.*to_apply=([^,{}\s]+)")
_SCOPE = re.compile(r" while\(.*op_name=\"([^\"]*)\"")
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")


class Loop(NamedTuple):
    """The loop of an action, in a compiled step.

    Attributes:
      place: of which action, and in which ticks.
      body: the names of all instructions in it.
    """

    place: Place
    body: frozenset[str]


class Event(NamedTuple):
    """Something of a loop that a device did.

    Attributes:
      device: its number in its process.
      loop: the loop's name in the compiled step.
      start: nanoseconds.
      end: nanoseconds.
    """

    device: int
    loop: str
    start: float
    end: float


Interval = tuple[float, float]
Key = Action | tuple[int, int, str]  # what all ranks do together goes by tick, slot and name


def trace(
    plan: Plan, operands: Operands, steps: int, directory: str | os.PathLike[str] | None
) -> Report:
    """Run a step under the profiler.

    Args:
      plan: the options of the pipeline.
      operands: of the step.
      steps: how many are measured, after one that is not.
      directory: where the profile stays; None for nowhere.

    Raises:
      ValueError: ``steps`` is no positive number, a step that has no actions of its own, or a
        profile that does not say when they ran.
    """
    check(plan, steps)
    model, weights, batch = operands
    compiled = runtime.train.lower(plan, model, weights, batch).compile()
    jax.block_until_ready(compiled(weights, batch))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # many more events than all others
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        with jax.profiler.trace(os.fspath(directory), profiler_options=options):
            for _ in range(steps):
                jax.block_until_ready(compiled(weights, batch))
        found = Path(directory).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(max(found, key=lambda path: path.stat().st_mtime)))
    devices: list[list[int]] = [[] for _ in range(plan.schedule.num_ranks)]
    axis = plan.mesh.axis_names.index(STAGE)
    for place, device in np.ndenumerate(plan.mesh.devices):
        devices[place[axis]].append(device.local_hardware_id)
    text = compiled.as_text() or ""
    loops, platform = loops_of(text), plan.mesh.devices.flat[0].platform
    module = _MODULE.search(text)
    slots: Any = {"pattern": pattern_of(plan), "partners": plan.partners}
    seen = events(profile, loops, platform, module[1] if module else None)
    return report(plan.training, loops, seen, devices, steps, **slots)


def check(plan: Plan, steps: int) -> None:
    """See that a step's actions can be found in a profile of this process.

    Raises:
      ValueError: they cannot.
    """
    if (count := integer(steps)) is None or count < 1:
        raise ValueError(f"trace(steps={steps!r}): the number of steps to measure; give 1 or more")
    if plan.is_masked:
        raise ValueError(
            "trace(): with bubbles='masked' every rank computes in every slot, whether it has an "
            "action or not, and a profile cannot tell them apart; trace with bubbles='skip'"
        )
    if plan.is_straight:
        raise ValueError(
            "trace(): on one rank with remat=None a step is plain accumulation, without a "
            "timetable: no actions to show; trace with remat='stage', or on more ranks"
        )
    processes = {device.process_index for device in plan.mesh.devices.flat}
    if processes != {jax.process_index()}:
        raise ValueError(
            f"trace(): the mesh lies on {len(processes)} processes, and a profile shows the "
            f"devices of one, by its own clock; trace a mesh of one process's devices"
        )


def pattern_of(plan: Plan) -> str | None:
    """The slots that run, by the name that the lockstep clock knows them by."""
    if plan.pattern is not None:
        return plan.pattern
    shared: dict[str, Any] = {"shared": plan.shared, **plan.sends}
    return simulate(plan.schedule, clock="lockstep", **shared).pattern


# --- from a profile to what devices did ---


def loops_of(hlo: str) -> dict[str, Loop]:
    """The loops of a compiled step that are actions, by name.

    Raises:
      ValueError: there are none.
    """
    computations: dict[str, dict[str, str]] = {}
    inside: dict[str, str] = {}
    for line in hlo.splitlines():
        if begun := _BEGIN.match(line):
            inside = computations.setdefault(begun[1], {})
        elif instruction := _INSTRUCTION.match(line):
            inside[instruction[1]] = line

    def names(line: str) -> Iterator[str]:
        for called in _CALLED.findall(line):
            for name, below in computations.get(called.strip("%"), {}).items():
                yield name
                yield from names(below)

    everything = [pair for inside in computations.values() for pair in inside.items()]
    calls = {
        called[1].strip("%"): name for name, line in everything if (called := _CALL.search(line))
    }
    found = {}
    for computation, inside in computations.items():
        for name, line in inside.items():
            scope = _SCOPE.search(line)
            place = place_of_loop(scope[1]) if scope else None
            if place is not None:  # a small loop may be compiled whole, as the call of a function
                found[calls.get(computation, name)] = Loop(place, frozenset(names(line)))
    if not found:
        raise ValueError(
            "the compiled step has none of the kernel's name scopes (such as "
            "'ticks0_38/slot1/B0_last/while'): it is not a pipeline's, or it was compiled without "
            "metadata; trace a Pipeline's own step, without XLA flags that drop op_name"
        )
    return found


def events(
    profile: ProfileData, loops: Mapping[str, Loop], platform: str, module: str | None = None
) -> list[Event]:
    """What devices did of the loops.

    Args:
      profile: as jax writes it.
      loops: of the compiled step.
      platform: "cpu", "gpu" or "tpu".
      module: the compiled step's name; events that name another do not count.

    Raises:
      ValueError: no devices of that platform are in it, no event of a loop, or one without what
        says which device it is of.
    """
    wanted = NAMES.get(platform, f"/device:{platform.upper()}:")
    found: list[Event] = []
    with warnings.catch_warnings():  # jaxlib's types of events have no __module__
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            device = _DEVICE.match(plane.name)
            if device and plane.name.startswith(wanted):
                found += _of_a_device(plane, int(device[1]), loops, module)
            elif plane.name.startswith(wanted):
                found += _of_virtual_devices(plane, loops, module)
    if not found:
        seen = ", ".join(repr(plane.name) for plane in profile.planes) or "none"
        raise ValueError(
            f"the profile has no event of the step's {len(loops)} loops (such as "
            f"{next(iter(loops))!r}) on a plane {wanted + '*'!r}; its planes are {seen}: it is of "
            f"another program, or the profiler of jax {jax.__version__} does not show them; trace "
            f"the step itself, or use a jax whose profile has 'hlo_op'"
        )
    return found


def _of_a_device(
    plane: Any, device: int, loops: Mapping[str, Loop], module: str | None
) -> Iterator[Event]:
    """The events of a device that has a plane of its own."""
    lines = list(plane.lines)  # a TPU shows the same again in others
    for line in [line for line in lines if line.name == "XLA Ops"] or lines:
        for event in line.events:
            stats = dict(event.stats)
            named = event.name.removeprefix("%").partition(" ")[0]  # TPUs show the instruction
            loop = named if named in loops else str(stats.get("hlo_op"))
            if loop in loops and module in (None, stats.get("hlo_module", module)):
                yield Event(device, loop, event.start_ns, event.start_ns + event.duration_ns)


def _of_virtual_devices(
    plane: Any, loops: Mapping[str, Loop], module: str | None
) -> Iterator[Event]:
    """The events of devices that share one plane, and say whose they are.

    A loop may return while threads are still at it. Its mark of the end then comes when all that
    follows in its thread has returned, perhaps ticks later; so it has ended, at the latest, when
    after the last of its body's instructions has begun the device begins another's.
    """
    marks: dict[int, float] = {}
    by_device: dict[int, list[tuple[float, float, str, int]]] = defaultdict(list)
    for line in plane.lines:
        for event in line.events:
            name, start, end = event.name, event.start_ns, event.start_ns + event.duration_ns
            stats = dict(event.stats)
            if name.startswith("end: ") and name[5:] in loops:
                marks[stats.get("_c", 0)] = end
            if "hlo_op" not in stats or module not in (None, stats.get("hlo_module", module)):
                continue
            if "device_ordinal" not in stats:
                raise ValueError(
                    f"the profile's event {name!r} on {plane.name!r} has no 'device_ordinal' (it "
                    f"has {', '.join(sorted(stats))}), so nothing says which virtual device ran "
                    f"it; trace with another jax than {jax.__version__}"
                )
            found = by_device[int(stats["device_ordinal"])]
            found.append((start, end, str(stats["hlo_op"]), stats.get("_p", 0)))
    for device, found in by_device.items():
        yield from _whole_loops(device, sorted(found), loops, marks)


def _whole_loops(
    device: int,
    found: list[tuple[float, float, str, int]],
    loops: Mapping[str, Loop],
    marks: Mapping[int, float],
) -> Iterator[Event]:
    """The loops among a device's (start, end, name, mark) in order of time, until they end."""
    at: dict[str, list[int]] = defaultdict(list)
    for n, (_, _, name, _) in enumerate(found):
        if name in loops:
            at[name].append(n)
    for name, times in at.items():
        for n, stop in itertools.pairwise([*times, len(found)]):
            start, end, _, mark = found[n]
            last = n
            for k in range(n + 1, stop):
                if found[k][2] in loops[name].body:
                    last, end = k, max(end, found[k][1])
            after = found[last + 1][0] if last + 1 < len(found) else end
            yield Event(device, name, start, max(end, min(marks.get(mark, end), after)))


# --- from what devices did to a report ---


def report(
    program: Program,
    loops: Mapping[str, Loop],
    seen: Iterable[Event],
    devices: Sequence[Sequence[int]],
    steps: int,
    *,
    pattern: str | None = None,
    partners: bool = False,
) -> Report:
    """What each rank did when, the median over steps and over the devices of a rank, in seconds.

    What the compiler left out (with remat the last stage's F, whose output nobody reads) takes no
    time, just before the rank's next action.

    Args:
      program: what ran.
      loops: of the compiled step.
      seen: what devices did of them, in all steps.
      devices: [S] the devices of each rank.
      steps: how many.
      pattern: the name of its slots.
      partners: as of `Report`.

    Raises:
      ValueError: events that are not those of this program.
    """
    by: dict[tuple[int, str], list[Interval]] = defaultdict(list)
    for event in seen:
        by[event.device, event.loop].append((event.start, event.end))
    runs = [
        [runs_of(program, rank, loops, by, device, steps) for device in held]
        for rank, held in enumerate(devices)
    ]
    zeros = [
        min(start for held in runs for run in held for start, _ in run[n].values())
        for n in range(steps)
    ]
    medians = [_median([(one[n], zeros[n]) for one in held for n in range(steps)]) for held in runs]
    schedule, shared = program.schedule, program.shared
    together = _together(medians)
    rows = [_in_order(order, one) for order, one in zip(schedule.orders, medians, strict=True)]
    times = np.concatenate(rows)
    first = min([float(times[:, 0].min()), *(start for start, _ in together.values())])
    times = (times - first) / SECOND
    common = (np.array(sorted(together.values())).reshape(-1, 2) - first) / SECOND
    flat, lasting = flatten(schedule), times[:, 1] - times[:, 0]
    each: Any = defaultdict(float)
    for (_, _, name), (start, end) in together.items():
        each[name] += (end - start) / SECOND
    share = schedule.num_ranks / schedule.num_microbatches
    costs = Costs(
        **_means(schedule.num_stages, flat.kind, flat.stage, lasting),
        head=each["head"] * share,
        embed=(each["lookup"] + each["scatter"]) * share / 2,
    )
    slots = {"pattern": pattern, "partners": partners, "delayed": program.delayed, "shared": shared}
    return sum_up(schedule, costs, "measured", slots, flat, times[:, 0], lasting, common)


def runs_of(
    program: Program,
    rank: int,
    loops: Mapping[str, Loop],
    by: Mapping[tuple[int, str], list[Interval]],
    device: int,
    steps: int,
) -> list[dict[Key, Interval]]:
    """[steps] when a device ran what.

    Raises:
      ValueError: a loop that was come to more often, or less, than the program says.
    """
    found: list[dict[Key, Interval]] = [{} for _ in range(steps)]
    for name, (place, _) in loops.items():
        ticks = range(place.start, place.stop)
        trips = dict(place.actions(program, rank))
        if not trips:
            continue
        seen = sorted(by.get((device, name), []))
        once, fetched = steps * len(ticks), steps * (len(ticks) + len(trips))
        if len(seen) not in (once, fetched):
            raise ValueError(
                f"the profile has {len(seen)} events of {name!r} ({place.label} in ticks "
                f"{place.start} to {place.stop - 1}) on device {device}, and {steps} steps of this "
                f"program make {once}, or {fetched} where a condition is fetched: it is of another "
                f"program, or events were lost; trace fewer steps, of this pipeline alone"
            )
        left = iter(seen)
        for run in found:
            for tick in ticks:
                start, end = next(left)
                if tick in trips and len(seen) != once:
                    start, end = end, next(left)[0]
                if tick in trips:
                    run[trips[tick] or (tick, place.slot, place.label)] = start, max(start, end)
    return found


def _median(runs: Sequence[tuple[dict[Key, Interval], float]]) -> dict[Key, Interval]:
    """Of runs, each with the time at which its step began; medians keep an order that all have."""
    middle: dict[Key, Interval] = {}
    for key in runs[0][0]:
        start, end = np.median([np.subtract(run[key], zero) for run, zero in runs], axis=0)
        middle[key] = float(start), float(end)
    return middle


def _together(medians: Sequence[Mapping[Key, Interval]]) -> dict[tuple[int, int, str], Interval]:
    """What all ranks do together: from when the last has begun until the first has ended."""
    found = {}
    for key in medians[0]:
        if not isinstance(key, Action):
            start = max(one[key][0] for one in medians)
            end = min(one[key][1] for one in medians)
            found[key] = start, max(start, end)
    return found


def _in_order(order: Sequence[Action], found: Mapping[Key, Interval]) -> NDArray[np.float64]:
    """[A, 2] when the actions of a rank began and ended, none before the one before it has.

    One that was not seen takes no time, when the next begins; at the end, when the last has ended.
    """
    rows: list[Interval] = []
    after = max((end for _, end in found.values()), default=0.0)
    for action in reversed(order):
        rows.append(found.get(action, (after, after)))
        after = rows[-1][0]
    times = np.array(rows[::-1], np.float64)
    times[1:, 0] = np.maximum(times[1:, 0], np.maximum.accumulate(times[:, 1])[:-1])
    times[:, 1] = np.maximum(times[:, 0], times[:, 1])
    return times


def _means(
    num_stages: int, kinds: NDArray[Any], stages: NDArray[Any], lasting: NDArray[np.float64]
) -> dict[str, Any]:
    """F, I, W and B of every stage as `Costs` takes them; of a kind that it lacks, what it can."""
    total, count = np.zeros((2, len(KINDS), num_stages))
    np.add.at(total, (kinds, stages), lasting)
    np.add.at(count, (kinds, stages), 1)
    f, b, i, w = total / np.maximum(count, 1)
    _, has_b, has_i, _ = count > 0
    i = np.where(has_i, i, b)
    found = {"f": f.tolist(), "i": i.tolist(), "w": w.tolist()}
    if not (has_b.any() and has_i.any()):
        return found
    return found | {"b": np.where(has_b, b, i + w).tolist()}
