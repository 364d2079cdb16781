"""Open MPI on hosts of this machine: mpirun reaches the second one by a false ssh."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import hosts, jobs
from tests.cluster.hosts import tool

# mpirun's host has a view of all processes in `{proc}`, by which the other one's network is found.
# What runs there keeps the first one's process numbers: siblings cannot be entered.
AGENT = """#!/bin/sh
ns={proc}/$(cat {folder}/pid.$1)/ns
shift
exec nsenter --net=$ns/net --uts=$ns/uts sh -c "$*"
"""
# After SIGTERM mpirun waits so long, sends SIGTERM to the tasks, waits so long again, and kills.
PATIENCE = ["--mca", "odls_base_sigkill_timeout", "4"]


def lane(folder: Path) -> Iterator[str]:
    """`mpirun -n 4` over two hosts: to its end, and stopped by SIGTERM and started again."""
    hosts.need({"mpirun": "openmpi-bin"})
    steps = 400
    wanted = jobs.alone(folder / "alone", steps)
    proc = folder / "proc"
    proc.mkdir()
    tool("mount", "--bind", "/proc", str(proc))
    try:
        with hosts.hosts(["host0", "host1"], folder) as pair:
            yield from _runs(folder, proc, pair, wanted)
    finally:
        tool("umount", str(proc))


def _runs(
    folder: Path, proc: Path, pair: list[hosts.Host], wanted: dict[int, float]
) -> Iterator[str]:
    agent = folder / "agent"
    agent.write_text(AGENT.format(proc=proc, folder=folder), encoding="utf-8")
    agent.chmod(0o755)
    for host in pair:
        (folder / f"pid.{host.name}").write_text(str(host.pid), encoding="ascii")
    where = ["--host", "host0:2,host1:2", "--mca", "plm_rsh_agent", str(agent)]
    where += ["--mca", "oob_tcp_if_include", "eth0", "--mca", "btl", "self,tcp", *PATIENCE]
    settings = [word for name in jobs.ALWAYS for word in ("-x", name)]

    def start(run: Path) -> None:
        run.mkdir(exist_ok=True)
        arguments = [sys.executable, jobs.PROGRAM, *jobs.options(run, steps=max(wanted), stages=4)]
        command = ["mpirun", "--allow-run-as-root", "--tag-output", "-n", "4", *where, *settings]
        pair[0].start([*command, *arguments], run / "out", jobs.ALWAYS)

    def ended(run: Path) -> int:
        process = pair[0].started[-1]
        hosts.wait(lambda: process.poll() is not None, f"the end of {run}")
        return int(process.returncode)

    for what in ("whole", "stopped"):
        began, run = time.monotonic(), folder / what
        start(run)
        note = ""
        if what == "stopped":
            hosts.wait(lambda run=run: len(jobs.losses(run)) >= 15, "step 15")
            pair[0].signal(signal.SIGTERM, "--allow-run-as-root")
            code, step = ended(run), jobs.losses(run)[-1][0]
            assert jobs.saved(run)[-1] == step < max(wanted), (code, step, jobs.saved(run))
            note = f"SIGTERM at step {step}: exit code {code}, state saved; "
            start(run)
        assert ended(run) == 0, (run / "out").read_text(encoding="utf-8")[-3000:]
        made = jobs.losses(run)
        assert made == sorted(wanted.items()), made
        text = (run / "out").read_text(encoding="utf-8", errors="replace")
        assert "[1,0]<stdout>:step " in text
        took = time.monotonic() - began
        yield f"mpirun -n 4 on 2 hosts: {note}losses equal to the last digit; {took:.0f} s"
