"""torch.distributed.pipelining beside ours: S processes over gloo, one thread each.

Another interpreter, which has torch, runs `bench/torch_rank.py`; weights, batch and gradients
travel in files. Between two steps its processes sleep on their input.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from flax import nnx

from bench.cases import Case

SCHEDULES = ("GPipe", "1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
RANK = Path(__file__).with_name("torch_rank.py")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Torch:
    """The processes of one case; a context manager.

    Args:
      python: an interpreter with torch.
      case: what they run.
      ranks: S.

    Attributes:
      version: of torch, known after the first step.
    """

    def __init__(self, python: str, case: Case, ranks: int) -> None:
        self._python, self._case, self._ranks, self.version = python, case, ranks, "?"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder, case = Path(self._folder.name), self._case
        (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)), encoding="utf-8")
        np.savez(folder / "weights.npz", **_weights(case))
        x, t = map(np.asarray, case.data())
        np.savez(folder / "batch.npz", x=x, t=t)
        port = free_port()
        self._processes = [
            subprocess.Popen(
                [self._python, str(RANK), str(rank), str(self._ranks), str(port), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(self._ranks)
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.communicate()  # closes its input, which ends it
        self._folder.cleanup()

    def seconds(self, name: str) -> float:
        """One step, timed on rank 0 from barrier to barrier."""
        return self._all(f"time {name}")

    def gradients(self, name: str) -> tuple[Any, list[Any]]:
        """Loss and gradients in layer order."""
        self._all(f"save {name}")
        found: dict[str, Any] = {}
        for rank in range(self._ranks):
            found |= np.load(Path(self._folder.name) / f"{name}-{rank}.npz")
        return found["loss"], [found[key] for key in _weights(self._case)]

    def _all(self, command: str) -> float:
        for process in self._processes:
            process.stdin.write(f"{command}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [process.stdout.readline().split() for process in self._processes]  # type: ignore[union-attr]
        if not all(answers):
            raise RuntimeError(f"torch: no answer to {command!r}; what it printed is above")
        _, taken, self.version = answers[0]
        return float(taken)


def _weights(case: Case) -> dict[str, Any]:
    """``layer/path`` to array, in layer order."""
    (stage,) = case.stages(1)
    found = {}
    for (_, layer, *rest), leaf in nnx.to_flat_state(nnx.state(stage)):
        found[f"{layer}/{'.'.join(rest)}"] = np.asarray(leaf[...])
    return found
