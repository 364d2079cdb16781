"""A report from a profile of devices: the times of each rank's actions.

A rank reaches an action's loop once a tick, and the program's table says at which ticks the loop
makes a trip. So the tick of a loop's n-th event on a device is known from n alone.

Letters: S ranks. Times are nanoseconds; in a report they are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.insight.profile.loops import Loop
from pipeline.insight.profile.read import Event
from schedules.clocks.report import Report, sum_up
from schedules.core.action import KINDS, Action
from schedules.core.costs import Costs
from schedules.core.flat import flatten
from schedules.core.schedule import Schedule
from schedules.lowering.program import Program

SECOND = 1e9

Interval = tuple[float, float]
Key = Action | tuple[int, int, str]  # work of all ranks together has tick, slot and name


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
    """Time each action of each rank, in seconds: the median over steps and over a rank's devices.

    An action that the compiler left out (with remat, the last stage's F, whose output is not read)
    takes no time, just before the rank's next action.

    Args:
      seen: the events of the step's loops, on all devices and in all steps.
      pattern: the name of the step's slots.

    Raises:
      ValueError: the events belong to another program.
    """
    by: dict[tuple[int, str], list[Interval]] = defaultdict(list)
    for event in seen:
        by[event.device, event.loop].append((event.start, event.end))
    runs = [
        [runs_of(program, rank, loops, by, device, steps) for device in held]
        for rank, held in enumerate(devices)
    ]
    slots = {"pattern": pattern, "partners": partners, "delayed": program.delayed}
    return report_runs(program.schedule, runs, steps, slots | {"shared": program.shared})


def report_runs(
    schedule: Schedule,
    runs: Sequence[Sequence[Sequence[dict[Key, Interval]]]],
    steps: int,
    slots: Mapping[str, Any],
) -> Report:
    """Make a report of [S][devices][steps] runs.

    Args:
      runs: by rank, device and step, when each action began and ended.
      slots: the fields of `Report` that describe lockstep.
    """
    zeros = [
        min(start for held in runs for run in held for start, _ in run[n].values())
        for n in range(steps)
    ]
    medians = [_median([(one[n], zeros[n]) for one in held for n in range(steps)]) for held in runs]
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
    slots = {**slots, "unit": "s"}
    return sum_up(schedule, costs, "measured", slots, flat, times[:, 0], lasting, common)


def runs_of(
    program: Program,
    rank: int,
    loops: Mapping[str, Loop],
    by: Mapping[tuple[int, str], list[Interval]],
    device: int,
    steps: int,
) -> list[dict[Key, Interval]]:
    """Return, for each step, the times of a device's actions.

    Raises:
      ValueError: a loop ran more or fewer times than in the program.
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
    """Compute median times over runs, from each step's begin; keep an order that all runs share."""
    middle: dict[Key, Interval] = {}
    for key in runs[0][0]:
        start, end = np.median([np.subtract(run[key], zero) for run, zero in runs], axis=0)
        middle[key] = float(start), float(end)
    return middle


def _together(medians: Sequence[Mapping[Key, Interval]]) -> dict[tuple[int, int, str], Interval]:
    """Return the intervals in which all ranks work: from the latest start to the earliest end."""
    found = {}
    for key in medians[0]:
        if not isinstance(key, Action):
            start = max(one[key][0] for one in medians)
            end = min(one[key][1] for one in medians)
            found[key] = start, max(start, end)
    return found


def _in_order(order: Sequence[Action], found: Mapping[Key, Interval]) -> NDArray[np.float64]:
    """Return [A, 2] start and end of a rank's actions, with starts in the rank's order.

    An action that was not seen takes no time: at the begin of the next action, or at the last end.
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
    """Compute the mean F, I, W and B of every stage for `Costs`; missing kinds are inferred."""
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
