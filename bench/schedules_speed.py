"""Seconds for large timetables, without jax: ``python -m bench.schedules_speed [family ...]``.

Every row is a process of its own, pinned to one core; seconds are those of its CPU, so that other
work on the machine disturbs little. The column "per doubling" is the growth of the total from the
row above, for each doubling of the actions: 2 is linear.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import schedules
from bench.measure import table

RANKS, CHUNKS = 64, 4
MICROBATCHES = (128, 512, 2048)
FAMILIES = ("interleaved_1f1b", "looped_bfs", "gpipe", "1f1b", "interleaved_zb")
STEPS: dict[str, Callable[[schedules.Schedule], Any]] = {
    "check": schedules.check,
    "simulate": schedules.simulate,
    "lockstep": lambda schedule: schedules.simulate(schedule, clock="lockstep"),
    "lower": schedules.lower,
}


def measure(family: str, num_microbatches: int) -> tuple[int, dict[str, float], int]:
    """Actions, seconds of each step, and the largest resident size in bytes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    seconds = {}
    start = time.process_time()
    schedule = schedules.build(
        family,
        num_ranks=RANKS,
        num_microbatches=num_microbatches,
        num_stages=CHUNKS * RANKS,
    )
    seconds["build"] = time.process_time() - start
    for name, step in STEPS.items():
        start = time.process_time()
        step(schedule)
        seconds[name] = time.process_time() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(map(len, schedule.orders)), seconds, kib * 1024


def main(families: tuple[str, ...]) -> None:
    """Print the table."""
    rows = []
    for family in families:
        before: tuple[int, float] | None = None
        for num_microbatches in MICROBATCHES:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                actions, seconds, size = pool.apply(measure, (family, num_microbatches))
            total = sum(seconds.values())
            growth = ""
            if before is not None:
                doublings = math.log2(actions / before[0])
                growth = f"{(total / before[1]) ** (1 / doublings):.2f}"
            before = actions, total
            times = [f"{value:.2f}" for value in (*seconds.values(), total)]
            rows.append([family, f"{actions:,}", *times, f"{size >> 20}", growth])
    print(f"S={RANKS}, V={CHUNKS}, one core; seconds")
    header = ["family", "actions", "build", *STEPS, "total", "peak MiB", "per doubling"]
    print(table(header, rows))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or FAMILIES)
