"""One of the processes of `bench.processes`: FOLDER.

It has one device and one core. All processes run the same program; the first writes the results.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, mean_square, reference, see_that_it_agrees
from bench.measure import interleaved, seconds

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from collectives import make_mesh, sum_over, vary
from pipeline import Pipeline, initialize
from pipeline.insight.calibrate.measure import EXCHANGES, exchanges
from pipeline.processes.cluster import PROCESS

# name: schedule, slot pattern
VARIANTS: dict[str, tuple[str, str | None]] = {
    "1f1b, partners": ("1f1b", "partner"),
    "eager_1f1b, paired": ("eager_1f1b", "paired"),
    "1f1b, full shift": ("1f1b", "single"),
}


def pipeline(case: Case, ranks: int, name: str, remat: Any) -> Pipeline:
    """A variant on S ranks."""
    schedule, pattern = VARIANTS[name]
    return Pipeline(
        case.stages(ranks),
        case.microbatches,
        schedule=schedule,
        pattern=pattern,
        mesh=make_mesh(stage=ranks),
        loss_fn=mean_square,
        remat=remat,
    )


def own_gradients(grads: Any) -> list[Any]:
    """Gradients of this process's stage."""
    return [np.asarray(g.addressable_shards[0].data)[0] for g in jax.tree.leaves(grads["chunks"])]


def see_that_mine_agree(name: str, step: Any, case: Case, rank: int, ranks: int) -> None:
    """Compare the loss and this rank's gradients with the unpipelined model's."""
    loss, grads = reference(case)
    each = len(grads) // ranks
    value, found = step()
    wanted = loss, grads[rank * each : (rank + 1) * each]
    see_that_it_agrees(name, (value, own_gradients(found)), wanted)


def timer(step: Callable[[], Any], meet: Callable[[], Any]) -> float:
    """Seconds from the moment that all are there until this rank has its results."""
    jax.block_until_ready(meet())
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def everybody() -> jax.Array:
    """S, once all ranks are there."""
    return sum_over(vary(jnp.ones(()), "stage"), "stage")


def main() -> None:
    """Check, then time all variants."""
    folder = Path(sys.argv[1])
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ[PROCESS])
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # before jax makes its threads
    ranks = initialize().count
    given = json.loads((folder / "given.json").read_text(encoding="utf-8"))
    case, remat, rounds = Case(**given["case"]), given["remat"], given["rounds"]
    mesh = make_mesh(stage=ranks)
    everywhere = jax.sharding.NamedSharding(mesh, P())
    batch = [
        jax.make_array_from_callback(x.shape, everywhere, lambda index, x=x: x[index])
        for x in map(np.asarray, case.data())
    ]
    meet = jax.jit(jax.shard_map(everybody, mesh=mesh, in_specs=(), out_specs=P()))
    timers = {}
    for name in VARIANTS:
        pipe = pipeline(case, ranks, name, remat)
        step = functools.partial(pipe.value_and_grad, *batch)
        see_that_mine_agree(name, step, case, rank, ranks)
        timers[name] = functools.partial(timer, step, meet)
    taken = interleaved(timers, rounds)
    exchange = functools.partial(seconds, exchanges(mesh, 4 * math.prod(case.shape)))
    comm = interleaved({"exchanges": exchange}, rounds)["exchanges"] / EXCHANGES
    if rank == 0:
        text = json.dumps({"taken": taken, "comm": comm})
        (folder / "found.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
