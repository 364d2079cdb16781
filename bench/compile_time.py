"""What compiling a step costs: ``python -m bench.compile_time``.

Seconds of CPU time to trace and compile it from nothing, which other work on the machine does not
change. It does not grow with M, since ticks are scanned; hardly with S, since ranks share one
program; and little from one family to the next, since actions of one kind share their code.
Letters: S ranks, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench import tpu
from bench.cases import Layers
from bench.measure import interleaved, table
from bench.step import RANKS, SCHEDULES, SIZES, mean_square

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from collectives import make_mesh
from examples.gpt import Stage
from pipeline import Pipeline
from schedules import ScheduleError, build, names

FEW, MANY = 8, 512
SMALL, LARGE = "v5e:2x2", "v5e:8x8"
FAMILIES_M = 8
TPU_M, WIDTH = 128, 512


def cpu_seconds(
    stages: Any, num_microbatches: int, shape: tuple[int, ...], **options: Any
) -> float:
    """Trace and compile a training step from nothing."""
    jax.clear_caches()
    start = time.process_time()
    pipe = Pipeline(stages, num_microbatches, loss_fn=mean_square, **options)
    everywhere = jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec())
    batch = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)
    pipe.lower(batch, batch).compile()
    return time.process_time() - start


def gpt_seconds(schedule: str, num_microbatches: int, num_stages: int = RANKS) -> float:
    """The step of a GPT on two virtual CPU devices."""
    each = SIZES.layers // num_stages
    stage = nnx.eval_shape(lambda: Stage(SIZES, each, nnx.Rngs(0)))
    shape = num_microbatches, SIZES.context, SIZES.width
    mesh = make_mesh(stage=RANKS)
    return cpu_seconds([stage] * num_stages, num_microbatches, shape, schedule=schedule, mesh=mesh)


def against_microbatches(rounds: int) -> None:
    """M = 512 beside M = 8."""
    timers = {
        (schedule, m): functools.partial(gpt_seconds, schedule, m)
        for schedule in SCHEDULES
        for m in (FEW, MANY)
    }
    taken = interleaved(timers, rounds)
    rows = [[name, *_pair(taken[name, FEW], taken[name, MANY])] for name in SCHEDULES]
    print(f"\nGPT on CPU, S={RANKS}")
    print(table(["schedule", f"M={FEW}", f"M={MANY}", "ratio"], rows), flush=True)


def against_families(rounds: int) -> None:
    """Every family beside GPipe; those that want two stages a rank cut the same model finer."""
    timers = {}
    for name in names():
        num_stages = _stages_for(name)
        timers[name] = functools.partial(gpt_seconds, name, FAMILIES_M, num_stages)
    taken = interleaved(timers, rounds)
    rows = [
        [name, str(_stages_for(name) // RANKS), *_pair(taken["gpipe"], taken[name])[1:]]
        for name in timers
    ]
    print(f"\nthe same, M={FAMILIES_M}: families")
    print(table(["schedule", "V", "seconds", "of gpipe's"], rows), flush=True)


def against_ranks(rounds: int) -> None:
    """S = 64 beside S = 4, by the TPU compiler."""
    meshes = [tpu.mesh(SMALL), tpu.mesh(LARGE)]
    timers = {
        (schedule, mesh.size): functools.partial(tpu_seconds, schedule, mesh)
        for schedule in SCHEDULES
        for mesh in meshes
    }
    taken = interleaved(timers, rounds)
    few, many = (mesh.size for mesh in meshes)
    rows = [[name, *_pair(taken[name, few], taken[name, many])] for name in SCHEDULES]
    print(f"\nresidual MLP on v5e, M={TPU_M}")
    print(table(["schedule", f"S={few}", f"S={many}", "ratio"], rows), flush=True)


def tpu_seconds(schedule: str, mesh: Mesh) -> float:
    """The step of an MLP on a slice that is not there."""
    stage = nnx.eval_shape(lambda: Layers(WIDTH, 2, nnx.Rngs(0)))
    shape = TPU_M * 8, WIDTH
    return cpu_seconds([stage] * mesh.size, TPU_M, shape, schedule=schedule, mesh=mesh)


def _stages_for(name: str) -> int:
    """K: one stage a rank if the family permits, else two."""
    try:
        build(name, num_ranks=RANKS, num_microbatches=FAMILIES_M, num_stages=RANKS)
    except ScheduleError:
        return 2 * RANKS
    return RANKS


def _pair(before: float, after: float) -> list[str]:
    return [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {
        "microbatches": against_microbatches,
        "families": against_families,
        "ranks": against_ranks,
    }
    parser.add_argument("parts", nargs="*", default=list(parts), help=", ".join(parts))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"trace and compile, seconds of CPU time, medians of {args.rounds} interleaved runs")
    for name in args.parts:
        if name == "ranks" and not tpu.is_here():
            print(f"\n{tpu.ABSENT}: S=64 beside S=4")
        else:
            parts[name](args.rounds)


if __name__ == "__main__":
    main()
