"""Costs of compiling a step: ``python -m bench.compile_time``.

Seconds of CPU time to trace and compile it from nothing, which other work on the machine does not
change. It does not grow with M, since ticks are scanned; hardly with S, since ranks share one
program; and little from one family to the next, since actions of one kind share their code. Plain
is the model of the same stages without a pipeline: a scan over microbatches that adds up what
`jax.value_and_grad` returns, on one device. It grows with the model, for it has code for each
stage. Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from typing import Any

import bench  # (sets XLA_FLAGS, before jax is imported)
from bench import tpu
from bench.cases import Layers
from bench.measure import interleaved, table
from bench.step import RANKS, REMATS, SCHEDULES, SIZES, mean_square

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from collectives import make_mesh
from examples.gpt import Stage
from pipeline import Pipeline
from schedules import ScheduleError, build, names

FEW, MANY = 8, 512
SLICES = "v5e:2x2", "v5e:8x8"
FAMILIES_M = 8
DEPTHS, DEEP = (2, 4, 8, 16), ("eager_1f1b", "zb_h1")  # S, with a block a stage
PLAIN, MOST = "plain", 2.0  # what CPU seconds are to be at most, of the plain model's
TPU_M, WIDTH = 128, 512


def cpu_seconds(
    stages: Any, num_microbatches: int, shape: tuple[int, ...], **options: Any
) -> float:
    """Trace and compile a training step from nothing."""
    start = _with_nothing_kept()
    pipe = Pipeline(stages, num_microbatches, loss_fn=mean_square, **options)
    everywhere = jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec())
    batch = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)
    pipe.lower(batch, batch).compile()
    return time.process_time() - start


def gpt_seconds(
    schedule: str,
    num_microbatches: int,
    num_stages: int = RANKS,
    remat: Any = "stage",
    *,
    ranks: int = RANKS,
    layers: int = SIZES.layers,
) -> float:
    """The step of a GPT on virtual CPU devices."""
    shape = num_microbatches, SIZES.context, SIZES.width
    options = {"schedule": schedule, "remat": remat, "mesh": make_mesh(stage=ranks)}
    return cpu_seconds(_stages(num_stages, layers), num_microbatches, shape, **options)


def plain_seconds(
    num_microbatches: int, num_stages: int = RANKS, *, layers: int = SIZES.layers
) -> float:
    """The GPT as one writes it without a pipeline, on one device."""
    start = _with_nothing_kept()
    parts = [nnx.split(stage) for stage in _stages(num_stages, layers)]
    params = [params for _, params in parts]

    def loss(params: list[Any], x: jax.Array, t: jax.Array) -> jax.Array:
        for (graphdef, _), one in zip(parts, params, strict=True):
            x = nnx.merge(graphdef, one)(x)
        return mean_square(x, t)

    def step(params: list[Any], inputs: jax.Array, targets: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(body, zeros, (inputs, targets))[0]

    batch = jax.ShapeDtypeStruct((num_microbatches, 1, SIZES.context, SIZES.width), jnp.float32)
    jax.jit(step).lower(params, batch, batch).compile()
    return time.process_time() - start


def _with_nothing_kept() -> float:
    """The process's time once what was traced and compiled before has gone."""
    jax.clear_caches()
    gc.collect()  # or what comes next pays for it
    return time.process_time()


def _stages(num_stages: int, layers: int) -> list[Any]:
    """The GPT of `bench.step`, of so many layers, in so many stages, as types."""
    each = layers // num_stages
    stage = nnx.eval_shape(lambda: Stage(SIZES, each, nnx.Rngs(0)))
    return [stage] * num_stages


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
    """Every family beside the plain model; those that want two stages a rank cut it finer."""
    timers: dict[Any, Any] = {
        (PLAIN, num_stages): functools.partial(plain_seconds, FAMILIES_M, num_stages)
        for num_stages in (RANKS, 2 * RANKS)
    }
    for name in names():
        for remat in REMATS:
            options = name, FAMILIES_M, _stages_for(name), remat
            timers[name, remat] = functools.partial(gpt_seconds, *options)
    taken = interleaved(timers, rounds)
    rows = [[f"{PLAIN}, K={k}", "", "", f"{taken[PLAIN, k]:.2f}", ""] for k in (RANKS, 2 * RANKS)]
    for name in names():
        k = _stages_for(name)
        plain = taken[PLAIN, k]
        rows += [
            [name, str(k // RANKS), str(remat), *_pair(plain, taken[name, remat])[1:]]
            for remat in REMATS
        ]
    print(f"\nthe same, M={FAMILIES_M}: families; wanted: at most {MOST:.0f} times the plain model")
    print(table(["schedule", "V", "remat", "seconds", "of plain"], rows), flush=True)


def against_depth(rounds: int) -> None:
    """A stage of one block for each rank, beside the plain model of as many blocks."""
    timers: dict[Any, Any] = {
        (PLAIN, ranks): functools.partial(plain_seconds, FAMILIES_M, ranks, layers=ranks)
        for ranks in DEPTHS
    }
    for ranks in DEPTHS:
        for name in DEEP:
            for remat in REMATS:
                options = name, FAMILIES_M, ranks, remat
                timer = functools.partial(gpt_seconds, *options, ranks=ranks, layers=ranks)
                timers[name, remat, ranks] = timer
    taken = interleaved(timers, rounds)
    rows = [[PLAIN, "", *(f"{taken[PLAIN, ranks]:.2f}" for ranks in DEPTHS)]]
    for name in DEEP:
        for remat in REMATS:
            ratios = (taken[name, remat, ranks] / taken[PLAIN, ranks] for ranks in DEPTHS)
            rows.append([name, str(remat), *(f"{ratio:.2f}" for ratio in ratios)])
    print(f"\nGPT on CPU, one block a stage, M={FAMILIES_M}: plain in seconds, others of plain")
    print(table(["schedule", "remat", *(f"S={ranks}" for ranks in DEPTHS)], rows), flush=True)


def against_ranks(rounds: int) -> None:
    """S = 64 beside S = 4, by the TPU compiler."""
    chips = map(tpu.devices, SLICES)
    meshes = [make_mesh(devices=each, stage=len(each)) for each in chips]
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
        "depth": against_depth,
        "ranks": against_ranks,
    }
    parser.add_argument("parts", nargs="*", default=list(parts), help=", ".join(parts))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] += f" {bench.COUNT}={max(DEPTHS)}"  # the last one counts
    print(f"trace and compile, seconds of CPU time, medians of {args.rounds} interleaved runs")
    for name in args.parts:
        if name == "ranks" and not tpu.is_here():
            print(f"\n{tpu.ABSENT}: S=64 beside S=4")
        else:
            parts[name](args.rounds)


if __name__ == "__main__":
    main()
