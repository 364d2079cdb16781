"""Times of a step's loops on devices, read off a profile.

XLA shows a loop in one of two ways. On CPUs and TPUs a loop is one event, from its beginning to its
end. On GPUs the events are fetches of its condition to the host, one at every tick and one after
every trip: the trip is between two fetches.

Times are nanoseconds.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from pipeline.insight.profile.loops import Loop

NAMES = {"cpu": "/host:CPU", "gpu": "/device:GPU:", "tpu": "/device:TPU:"}
_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")


class Event(NamedTuple):
    """An event of a loop, on a device.

    Attributes:
      device: the device's number in its process.
      loop: the loop's name in the compiled step.
      start: nanoseconds.
      end: nanoseconds.
    """

    device: int
    loop: str
    start: float
    end: float


class Instruction(NamedTuple):
    """An instruction that a device ran.

    Attributes:
      start: nanoseconds.
      end: nanoseconds.
      module: the name of the instruction's program.
    """

    start: float
    end: float
    module: str
    name: str


def events(
    profile: ProfileData, loops: Mapping[str, Loop], platform: str, module: str | None = None
) -> list[Event]:
    """Read the events of the loops on devices.

    Args:
      platform: "cpu", "gpu" or "tpu".
      module: the compiled step's name; events of other modules do not count.

    Raises:
      ValueError: the profile has no devices of that platform or no event of a loop, or an event
        does not name its device.
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


def instructions(profile: ProfileData, platform: str) -> Iterator[tuple[int, Instruction]]:
    """Yield the instructions that devices ran, each with the device's number in its process."""
    wanted = NAMES.get(platform, f"/device:{platform.upper()}:")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            if not plane.name.startswith(wanted):
                continue
            device = _DEVICE.match(plane.name)
            for event in itertools.chain.from_iterable(line.events for line in _lines(plane)):
                stats = dict(event.stats)
                number = device[1] if device else stats.get("device_ordinal")
                if number is not None and {"hlo_op", "hlo_module"} <= set(stats):
                    end = event.start_ns + event.duration_ns
                    found = event.start_ns, end, str(stats["hlo_module"]), str(stats["hlo_op"])
                    yield int(number), Instruction(*found)


def _lines(plane: Any) -> list[Any]:
    """Return the lines with instructions; a TPU plane repeats them in other lines."""
    lines = list(plane.lines)
    return [line for line in lines if line.name == "XLA Ops"] or lines


def _of_a_device(
    plane: Any, device: int, loops: Mapping[str, Loop], module: str | None
) -> Iterator[Event]:
    """Yield the events of a device that has a plane of its own."""
    for line in _lines(plane):
        for event in line.events:
            stats = dict(event.stats)
            named = event.name.removeprefix("%").partition(" ")[0]  # a TPU's name is an instruction
            loop = named if named in loops else str(stats.get("hlo_op"))
            if loop in loops and module in (None, stats.get("hlo_module", module)):
                yield Event(device, loop, event.start_ns, event.start_ns + event.duration_ns)


def _of_virtual_devices(
    plane: Any, loops: Mapping[str, Loop], module: str | None
) -> Iterator[Event]:
    """Yield the events of devices that share one plane; each event names its device.

    A loop may return while threads still run it. The event of the loop's end then comes when
    everything that follows in the thread has returned, perhaps ticks later. So the loop has ended
    at the latest when the device begins another instruction after the last instruction of the
    loop's body.
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
    """Yield the loops among a device's (start, end, name, mark), in order of time, with ends."""
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
