"""Faults of hosts, links and processes: how each job ends, what it says, and what it loses."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster import hosts, jobs
from tests.cluster.hosts import Host

HEARTBEAT, TIMEOUT = 10.0, 30.0
# Until the last survivor ends: silence, a look of jax's service, `grace` after an exception.
LIMIT = 2 * HEARTBEAT + 5
WATCH = {"every": 1, "heartbeat": HEARTBEAT, "stuck_after": 20.0, "timeout": TIMEOUT}
FAULTS: dict[str, Callable[[Host], None]] = {
    "SIGKILL": lambda host: host.signal(signal.SIGKILL, jobs.PROGRAM),
    "host killed": lambda host: host.kill(),
    "link down": lambda host: host.link("down"),
    "SIGSTOP": lambda host: host.signal(signal.SIGSTOP, jobs.PROGRAM),
    "SIGTERM": lambda host: host.signal(signal.SIGTERM, jobs.PROGRAM),
}
# Lines that say why a process ended, the plainest first.
WHY = (
    r"process \d+ of \d+ on \S+: (process .*?)(?:: |\. )",
    r"(process 0 cannot listen at .*?): ",
    r"process \d+ of \d+: (not all processes have come .*?);",
    r"process \d+ of \d+.* (is stuck: .*)",
    r"process \d+ of \d+: (its program has failed, .*?):",
    r"(JAX distributed service detected fatal errors)",
)


def names(count: int) -> list[str]:
    return [f"host{index}" for index in range(count)]


def why(text: str) -> str:
    """The lines that a process wrote about its end."""
    for pattern in WHY:
        if found := re.search(pattern, text):
            return found[1].strip()
    return "nothing"


def strike(folder: Path, count: int, kind: str, who: int, *, steps: int, number: int) -> str:
    """Run a job on so many hosts, have a fault on one of them, and see how all end.

    Returns:
      A row of a table: fault, what the others wrote, seconds, steps lost.

    Raises:
      AssertionError: somebody did not end, said nothing, or left a process behind.
    """
    folder.mkdir(exist_ok=True)
    arguments = jobs.options(folder, steps=1_000_000, stages=4, **WATCH)
    with hosts.hosts(names(count), folder) as all_hosts:
        run = jobs.Run(all_hosts, folder, arguments, number=number)
        run.until_step(steps)
        struck = time.monotonic()
        FAULTS[kind](all_hosts[who])
        held = [who] if kind == "SIGSTOP" else []
        codes = run.until_end(LIMIT, but=held)
        others = [i for i in range(count) if i != who or kind in ("SIGTERM", "link down")]
        took = max(run.ended[i] for i in others) - struck
        left = [i for i in others if all_hosts[i].processes()]
        assert not left, f"{kind}: processes remain on {left}"
        assert 0 not in [codes[i] for i in others], codes
        if kind == "SIGTERM":
            assert set(codes) == {143}, codes
    step, kept = run.steps()[-1][0], jobs.saved(folder)[-1]
    assert kept == step if kind == "SIGTERM" else 0 <= step - kept <= 3, (step, kept)
    said = {why(run.said(i)) for i in others}
    if kind == "SIGTERM":
        assert "SIGTERM: stopping after this step" in run.said(who)
        said = {"all end with 143, the state saved"}
    assert "nothing" not in said, f"{kind}: nothing was written"
    where = f"{kind}, process {who} of {count}"
    return f"| {where} | {'; '.join(sorted(said))} | {took:.1f} | {step - kept} |"


def taken(folder: Path) -> str:
    """A port that somebody uses: process 0 says so, and the other one ends after `timeout`."""
    folder.mkdir()
    server = ["python3", "-m", "http.server", str(jobs.PORT)]
    with hosts.hosts(names(2), folder) as two:
        two[0].start(server, folder / "server.log")
        hosts.wait(lambda: "python3" in two[0].run("ss", "-lp"), "the server")
        arguments = jobs.options(folder, steps=3, stages=2, **WATCH)
        began = time.monotonic()
        run = jobs.Run(two, folder, arguments)
        codes = run.until_end(TIMEOUT + 60)
        assert codes[0] == 1, codes
        assert codes[1] not in (0, None), codes
        took = max(run.ended.values()) - began
        said = "; ".join(why(run.said(i)) for i in range(2))
    return f"| port taken, process 0 of 2 | {said} | {took:.1f} | - |"


def go_on(folder: Path, count: int, steps: int, *, number: int) -> list[tuple[int, float]]:
    """Resume a run on so many hosts for so many steps; returns these."""
    total = (jobs.saved(folder) or [0])[-1] + steps
    with hosts.hosts(names(count), folder) as all_hosts:
        arguments = jobs.options(folder, steps=total, stages=4, **WATCH)
        run = jobs.Run(all_hosts, folder, arguments, number=number)
        assert set(run.until_end()) == {0}, run.said(0)[-3000:]
    found = run.steps()
    assert [step for step, _ in found] == list(range(total - steps + 1, total + 1)), found
    return found


def compare(folder: Path) -> str:
    """Compare all losses of a run with those of one process, and say how far they are apart."""
    made = jobs.losses(folder)
    wanted = jobs.alone(folder / "alone", max(step for step, _ in made))
    worst = max(abs(loss - wanted[step]) / wanted[step] for step, loss in made)
    assert worst < 1e-5, worst
    same = sum(loss == wanted[step] for step, loss in made)
    return (
        f"{len(made)} losses of {max(wanted)} steps: {same} equal one process's to the last digit, "
        f"the others within {worst:.1e}"
    )


def table(folder: Path) -> Iterator[str]:
    """Each fault once, on 4 hosts and on the coordinator of 2; then 4 hosts become 2."""
    yield "| fault | what the others write | seconds | steps lost |"
    yield "|---|---|---|---|"
    number = 0
    for kind in FAULTS:
        for count, who in ((4, 2), (2, 0)):
            yield strike(folder / "run", count, kind, who, steps=4, number=number)
            number += 1
    yield taken(folder / "port")
    go_on(folder / "run", 4, 4, number=number)
    go_on(folder / "run", 2, 4, number=number + 1)
    yield f"4 hosts, then 2: {compare(folder / 'run')}"


def random_faults(folder: Path, count: int = 50, seed: int = 0) -> Iterator[str]:
    """So many faults in a row on one run, of random kind, process, moment and number of hosts."""
    draw = random.Random(seed)
    lost = []
    for number in range(count):
        size = draw.choice((2, 2, 2, 4))
        row = strike(
            folder / "run",
            size,
            draw.choice(list(FAULTS)),
            draw.randrange(size),
            steps=draw.randrange(1, 12),
            number=number,
        )
        lost.append(int(row.split("|")[-2]))
        yield f"{number + 1} {row}"
    go_on(folder / "run", 2, 4, number=count)
    yield f"steps lost after the last one saved: {max(lost)} at most, {sum(lost)} in all"
    yield compare(folder / "run")
