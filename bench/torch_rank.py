"""One rank of torch.distributed.pipelining; `bench.torch_peer` starts S of them.

A script for an interpreter that has torch and no jax: RANK S PORT FOLDER. The folder holds the
case, weights and batch. Reads commands from its input: ``time NAME`` runs a step and answers with
its seconds, ``save NAME`` runs a step and writes loss and gradients; every rank gets every command.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch_stages import make_stage, mean_square

SCHEDULES = {  # how stages lie on ranks: one each, round after round, or there and back
    "GPipe": "one",
    "1F1B": "one",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
}


def stages_of(placement: str, rank: int, ranks: int) -> list:
    """The stages of a rank."""
    last = {"one": [], "loop": [rank + ranks], "v": [2 * ranks - 1 - rank]}
    return [rank, *last[placement]]


class Peer:
    """A schedule on this rank, with weights of its own."""

    def __init__(self, name: str, case: dict, folder: Path, rank: int, ranks: int) -> None:
        self.stages, self.own = stages_of(SCHEDULES[name], rank, ranks), {}
        count = len(self.stages) * ranks
        stored, layers = np.load(folder / "weights.npz"), [{} for _ in range(case["layers"])]
        for key in stored:
            layer, path = key.split("/")
            layers[int(layer)][path] = stored[key]
        each = case["layers"] // count
        parts = []
        for k in self.stages:
            module, own = make_stage(layers[k * each : (k + 1) * each], case)
            self.own.update({k * each + n: weights for n, weights in enumerate(own)})
            parts.append(pipelining.PipelineStage(module, k, count, torch.device("cpu")))
        batch = np.load(folder / "batch.npz")
        self.inputs, self.targets = (torch.from_numpy(batch[key]) for key in ("x", "t"))
        make = getattr(pipelining, f"Schedule{name}")
        given = parts if len(parts) > 1 else parts[0]
        self.schedule = make(given, case["microbatches"], loss_fn=mean_square)
        self.has_first, self.has_last = 0 in self.stages, count - 1 in self.stages
        self.losses = []

    def step(self) -> None:
        """Forward and backward for the whole batch, gradients from nothing."""
        for weights in self.own.values():
            for w in weights.values():
                w.grad = None
        self.losses.clear()
        arguments = [self.inputs] if self.has_first else []
        options = {"return_outputs": False}
        if self.has_last:
            options |= {"target": self.targets, "losses": self.losses}
        self.schedule.step(*arguments, **options)

    def save(self, path: Path) -> None:
        """Write loss and gradients of the last step."""
        found = {
            f"{layer}/{name}": w.grad.numpy()
            for layer, weights in self.own.items()
            for name, w in weights.items()
        }
        if self.has_last:
            found["loss"] = np.mean([loss.item() for loss in self.losses])
        np.savez(path, **found)


def main() -> None:
    """Serve until the input ends."""
    rank, ranks, port = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    peers = {name: Peer(name, case, folder, rank, ranks) for name in SCHEDULES}
    for line in sys.stdin:
        command, name = line.split()
        dist.barrier()
        start = time.perf_counter()
        peers[name].step()
        dist.barrier()
        taken = time.perf_counter() - start
        if command == "save":
            peers[name].save(folder / f"{name}-{rank}.npz")
        print(f"done {taken!r} {torch.__version__}", flush=True)


if __name__ == "__main__":
    main()
