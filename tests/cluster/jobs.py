"""The job that the lane runs, `examples/train_processes.py`, on hosts, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import LONGEST_WAIT, Host, wait

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "examples" / "train_processes.py")
PORT = 8476
FLAGS = "--xla_force_host_platform_device_count="
ALWAYS = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": f"{FLAGS}1",
}


def options(folder: Path, **given: object) -> list[str]:
    """Options of the example; a run's folder has its losses and its checkpoints."""
    said = {"losses": folder / "losses.jsonl", "checkpoints": folder / "checkpoints"} | given
    return [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all steps of a run, in the order in which they were made."""
    path = folder / "losses.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [tuple(json.loads(line)) for line in text.splitlines()]


def saved(folder: Path) -> list[int]:
    """Steps of the checkpoints of a run."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def alone(folder: Path, steps: int, **given: object) -> dict[int, float]:
    """Losses of one process with four devices, by step: what all others are compared with."""
    arguments = options(folder, steps=steps, stages=4, **given)
    arguments = [one for one in arguments if not one.startswith("--checkpoints")]
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, **ALWAYS, "XLA_FLAGS": f"{FLAGS}4"}
    command = [sys.executable, PROGRAM, *arguments]
    subprocess.run(command, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return dict(losses(folder))


@dataclass
class Run:
    """A job of one process on each host."""

    hosts: Sequence[Host]
    folder: Path
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.began = len(losses(self.folder))
        self.ended: dict[int, float] = {}  # seconds of the clock, by process
        self.running = []
        for index, host in enumerate(self.hosts):
            place = {
                "SHARDPIPE_COORDINATOR": f"{self.hosts[0].name}:{PORT}",
                "SHARDPIPE_PROCESSES": str(len(self.hosts)),
                "SHARDPIPE_PROCESS": str(index),
            }
            command = [sys.executable, PROGRAM, *self.arguments]
            environment = {**ALWAYS, **place, **self.environment}
            self.running.append(host.start(command, self.log(index), environment))

    def log(self, index: int) -> Path:
        return self.folder / f"{self.number}.{index}.log"

    def said(self, index: int) -> str:
        return self.log(index).read_text(encoding="utf-8", errors="replace")

    def steps(self) -> list[tuple[int, float]]:
        """Steps of this run, not of those before it."""
        return losses(self.folder)[self.began :]

    def codes(self) -> list[int | None]:
        """Exit codes as a shell gives them; None where a process runs."""
        for index, process in enumerate(self.running):
            if process.poll() is not None:
                self.ended.setdefault(index, time.monotonic())
        codes = [process.returncode for process in self.running]
        return [128 - code if code is not None and code < 0 else code for code in codes]

    def until_step(self, count: int) -> None:
        """Wait until the run has made so many steps."""

        def there() -> bool:
            if None not in self.codes():
                raise RuntimeError(f"{self.folder}: ended early: {self.said(0)[-2000:]}")
            return len(self.steps()) >= count

        wait(there, f"step {count} of {self.folder}")

    def until_end(self, seconds: float = LONGEST_WAIT, but: Sequence[int] = ()) -> list[int | None]:
        """Wait until all processes have ended, but for those that a fault holds; their codes."""
        rest = [index for index in range(len(self.hosts)) if index not in but]
        wait(
            lambda: all(self.codes()[index] is not None for index in rest),
            f"end of {self.folder}",
            seconds,
        )
        return self.codes()
