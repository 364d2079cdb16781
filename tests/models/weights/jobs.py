"""Programs of processes in the tests: python jobs.py NAME FOLDER, perhaps launched.

memory FOLDER    reads a checkpoint in one of two processes; prints how much its host held at most
layers FOLDER    the same for a small one; prints digests of all layers, and writes it again
stream FOLDER    sums of the weights of the small one on each process's devices, by name, on meshes
                 of both processes and of the second alone
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from collectives import make_mesh
from pipeline import initialize, weights


def status(name: str) -> int:
    """Bytes of this process, by the kernel."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def memory(folder: Path) -> dict[str, Any]:
    """The most that was held beyond what was there before, and the shards of this process."""
    mesh = make_mesh(stage=jax.device_count())
    # What only the first pipeline of a process takes, such as modules that are loaded late.
    weights.load(folder / "warm", mesh=mesh)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is now's
    before = status("VmRSS")
    pipe = weights.load(folder / "large", mesh=mesh)
    peak = status("VmHWM") - before
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(nnx.state(pipe, nnx.Param))
        for shard in leaf.addressable_shards
    )
    return {"peak": peak, "shards": held}


def layers(folder: Path) -> dict[str, Any]:
    """Digests of layers, and what is said where the first process cannot write."""
    pipe = weights.load(folder / "given", layout="Ett|tL", mesh=make_mesh(stage=2))
    found = {}
    for layer in weights.named_layers(pipe):
        digest = hashlib.sha256()
        for name, tensor in layer.tensors.items():
            digest.update(name.encode() + tensor.tobytes())
        found[layer.name] = digest.hexdigest()
    weights.save(pipe, folder / "out")
    try:
        weights.save(pipe, folder / "given")
    except ValueError as error:
        return {"layers": found, "refused": str(error)}
    return {"layers": found, "refused": ""}


def stream(folder: Path) -> dict[str, Any]:
    """Sums of this process's parts of each weight, on three placements."""
    pipe = weights.load(folder / "given", layout="Ett|tL", mesh=make_mesh(stage=2))
    both, second = (Mesh(np.array(jax.devices()[n:][::-1]), ("tensor",)) for n in (0, 1))
    return {
        where: {
            name: [float(np.abs(shard.data).sum()) for shard in array.addressable_shards]
            for _, name, array in weights.stream(pipe, mesh=mesh)
        }
        for where, mesh in (("pipeline", None), ("both", both), ("second", second))
    }


if __name__ == "__main__":
    initialize()
    result = {"memory": memory, "layers": layers, "stream": stream}[sys.argv[1]](Path(sys.argv[2]))
    path = Path(sys.argv[2]) / f"{sys.argv[1]}-{jax.process_index()}.json"
    path.write_text(json.dumps(result), encoding="utf-8")
