"""Hosts with addresses of their own: the losses of one process, and steps over slow links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from schedules import Costs, build, simulate
from tests.cluster import hosts, jobs
from tests.cluster.faults import names

WIDTH, MICROBATCHES, CONTEXT, ROWS, PARTS = 512, 8, 32, 2, 6
MESSAGE = ROWS * CONTEXT * WIDTH * 4  # bytes, each way, of a microbatch
SLOW = ("1gbit", "100mbit")
BITS = {"1gbit": 1e9, "100mbit": 1e8}


def lane(folder: Path) -> Iterator[str]:
    """Losses on 2 and 4 hosts, then the time of a step with links of two rates."""
    wanted = jobs.alone(folder / "alone", 30)
    for count in (2, 4):
        run = folder / f"on{count}"
        run.mkdir()
        with hosts.hosts(names(count), run) as some:
            job = jobs.Run(some, run, jobs.options(run, steps=30, stages=4))
            assert set(job.until_end()) == {0}, job.said(0)[-3000:]
        assert jobs.losses(run) == sorted(wanted.items())
        yield f"{count} hosts: 30 losses equal to the last digit"
    yield from _slow(folder / "slow")


def _slow(folder: Path) -> Iterator[str]:
    """The time of a step, measured while the rate of the link changes, and by the clock."""
    folder.mkdir()
    arguments = jobs.options(
        folder, steps=1_000_000, stages=2, width=WIDTH, microbatches=MICROBATCHES, schedule="1f1b"
    )
    arguments = [one for one in arguments if not one.startswith("--checkpoints")]
    with hosts.hosts(names(2), folder) as pair:
        job = jobs.Run(pair, folder, arguments)
        job.until_step(10)
        free, sent = _step(job)
        times = {}
        for rate in SLOW:
            for host in pair:
                host.slow(rate)
            job.until_step(len(job.steps()) + 3)
            times[rate], _ = _step(job)
        for host in pair:
            host.signal(9)
        job.until_end(60)
    rest = max(sent - MESSAGE * MICROBATCHES, 0)  # sums of gradients that both hosts have
    yield (
        f"a step takes {1e3 * free:.0f} ms; host 0 sends {sent / 1e6:.2f} MB in it, of which "
        f"messages are {MESSAGE * MICROBATCHES / 1e6:.2f} MB"
    )
    for rate, seconds in times.items():
        said = predicted(free, MESSAGE * 8 / BITS[rate], rest * 8 / BITS[rate])
        yield f"{rate}: {seconds / free:.2f} times as long, by the clock {said:.2f}"


def predicted(step: float, message: float, rest: float) -> float:
    """How many times longer a step is, by the clock of the engine `scan` between processes.

    Args:
      step: seconds of one without messages.
      message: seconds of one message.
      rest: seconds of what is sent once in a step.
    """
    schedule = build("1f1b", num_ranks=2, num_microbatches=MICROBATCHES)
    # With remat="stage" a backward repeats its forward; the last stage's own F takes nothing.
    work = {"f": [1.0, 0.0], "b": 3.0}

    def span(comm: float, optimizer: float) -> float:
        costs = Costs(**work, comm=comm, optimizer=optimizer)
        return simulate(schedule, costs, "lockstep", partners=True).makespan

    unit = step / span(0, 0)
    return span(message / unit, rest / unit) / span(0, 0)


def _step(job: jobs.Run) -> tuple[float, float]:
    """(seconds, bytes that host 0 sends) of a step: the median of a few stretches of ten."""
    found = []
    for _ in range(PARTS):
        begin, first, sent = time.monotonic(), len(job.steps()), _sent(job.hosts[0])
        hosts.wait(lambda first=first: len(job.steps()) >= first + 10, "ten steps")
        steps = len(job.steps()) - first
        seconds = (time.monotonic() - begin) / steps
        found.append((seconds, (_sent(job.hosts[0]) - sent) / steps))
    seconds, sent = (statistics.median(part) for part in zip(*found, strict=True))
    return seconds, sent


def _sent(host: hosts.Host) -> int:
    counter = Path("/sys/class/net") / host.cable / "statistics" / "rx_bytes"
    return int(counter.read_text(encoding="ascii"))
