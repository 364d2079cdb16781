"""Names of processes, in variables and in texts; and lines that a process writes unbuffered."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Variables that `pipeline.processes.launch` sets, and that users may set by hand.
COORDINATOR = "SHARDPIPE_COORDINATOR"
PROCESSES = "SHARDPIPE_PROCESSES"
PROCESS = "SHARDPIPE_PROCESS"


def numbers(processes: Sequence[int]) -> str:
    """Write ascending numbers with ranges: 0, 2-5."""
    runs: list[list[int]] = []
    for process in processes:
        if runs and process == runs[-1][1] + 1:
            runs[-1][1] = process
        else:
            runs.append([process, process])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def text_of_processes(who: Sequence[int]) -> str:
    """Write ``process 3``, or ``processes 0, 2-5``."""
    return f"process{'es' if len(who) > 1 else ''} {numbers(who)}"


def write_at_once(text: str) -> None:
    """Write a line to standard error without Python's buffers and locks, as handlers need it."""
    os.write(2, f"{text}\n".encode())
