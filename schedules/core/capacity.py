"""Checks that refuse schedules larger than the available memory, before any allocation.

The bytes per action and per slot are measured, and rounded down, so that no schedule is refused
that would have fitted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from schedules.core.action import ScheduleError, shorten
from schedules.core.timetable import Timetable

HELD = 250  # bytes for an action, as an object and in the columns of `schedules.core.flat`
LOWERED = 100  # additional bytes for an action while a schedule is lowered
SLOT = 40  # bytes for a slot of one rank, in a program's tables, or for an exchange of two ranks
ALWAYS_FITS = 1 << 28  # bytes; a smaller need is never compared with the memory


def check_actions_fit(num_stages: int, num_microbatches: int, num_slices: int = 1) -> None:
    """Check that memory suffices to hold and check a schedule, which has 2KMN actions or more."""
    actions = 2 * num_stages * num_microbatches * num_slices
    _check_fits(
        actions * HELD,
        f"num_microbatches={shorten(num_microbatches)} with num_stages={shorten(num_stages)}: a "
        f"schedule of {shorten(actions)} actions or more",
        "use fewer microbatches, or fewer stages",
    )


def check_slots_fit(schedule: Timetable, num_slots: int) -> None:
    """Check that memory suffices to lower a schedule to ``num_slots`` slots, over all ticks."""
    actions = sum(map(len, schedule.orders))
    _check_fits(
        actions * (HELD + LOWERED) + (num_slots + schedule.num_ranks) * schedule.num_ranks * SLOT,
        f"schedule {schedule.name!r} ({schedule.num_ranks} ranks, {actions} actions): its tables "
        f"of {num_slots} slots for every rank",
        "lower a schedule of fewer ranks, or of fewer microbatches",
    )


def _check_fits(needed: int, what: str, remedy: str) -> None:
    if needed > ALWAYS_FITS and needed > memory():
        raise ScheduleError(
            f"{what}, which need about {bytes_text(needed)} of memory; this process can have "
            f"{bytes_text(memory())}: {remedy}"
        )


def memory() -> float:
    """Return the bytes that this process can have, by the machine, control groups and limits."""
    return min(_bounds(), default=float("inf"))


def _bounds() -> Iterator[int]:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:
        return
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft
    yield from _control_groups()


def _control_groups(system: Path = Path("/")) -> Iterator[int]:
    """List the memory limits of the process's Linux control groups and their parent groups."""
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = system / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, file = system / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for group in (here, *here.parents):
            if group.is_relative_to(root):
                try:
                    yield int((group / file).read_text(encoding="ascii"))
                except (OSError, ValueError):  # missing, or "max"
                    continue


def bytes_text(count: float) -> str:
    """Write a number of bytes as text, such as ``1.5 MiB``; exact below a KiB."""
    for power, unit in enumerate(("PiB", "TiB", "GiB", "MiB", "KiB")):
        size = 1 << 10 * (5 - power)
        if count >= size:
            return f"{min(count, 1 << 99) / size:.1f} {unit}"
    return f"{count} B"
