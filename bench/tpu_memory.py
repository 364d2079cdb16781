"""Bytes of a large step, by the TPU compiler: ``python -m bench.tpu_memory``.

A v5e 2x4 slice, S = 8, M = 32, a stage of 4 residual MLP layers of 4096 x 16384, 2048 rows a
microbatch, weights and sums of gradients in bfloat16: 1 GiB of either on each rank. Gradients are
results of the step and lie where those go, so they are no temporary. Beside the compiler's
temporaries is what `pipe.describe` predicts of them. ``--help`` lists what can be
asked for instead. Takes one to two minutes of CPU time for each schedule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from bench import tpu
from bench.measure import table

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from pipeline import Pipeline
from pipeline.insight.forecast.bytes import predict

LAYERS, WIDTH, HIDDEN, ROWS = 4, 4096, 16384, 2048
GIB = 2**30
HEADER = [
    "schedule",
    "M",
    "buffers",
    "temporaries",
    "predicted",
    "arguments",
    "results",
    "CPU seconds",
]


def matrix(*shape: int) -> nnx.Param:
    """Weights; only their type matters."""
    return nnx.Param(jnp.zeros(shape, jnp.bfloat16))


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A residual MLP layer."""
    return x + jax.nn.gelu(x @ up) @ down


class Layer(nnx.Module):
    """The weights of one."""

    def __init__(self) -> None:
        self.up, self.down = matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)


class Looped(nnx.Module):
    """A stage that is a Python loop over its layers."""

    def __init__(self) -> None:
        self.layers = nnx.List([Layer() for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for each in self.layers:
            x = layer(x, each.up[...], each.down[...])
        return x


class Scanned(nnx.Module):
    """A stage that scans over stacked weights."""

    def __init__(self) -> None:
        self.up, self.down = matrix(LAYERS, WIDTH, HIDDEN), matrix(LAYERS, HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self.up[...], self.down[...]
        return jax.lax.scan(lambda x, w: (layer(x, *w), None), x, weights)[0]


STAGES: dict[str, Callable[[], nnx.Module]] = {"loop": Looped, "scan": Scanned}


def mean(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A mean, whose weight is known before the step."""
    return jnp.mean(jnp.square((outputs - targets).astype(jnp.float32)))


def pair(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss as a sum and its weight, which is known only after it."""
    return mean(outputs, targets) * outputs.size, jnp.full((), float(outputs.size))


LOSSES = {"mean": mean, "pair": pair}


def row(mesh: Mesh, schedule: str, num_microbatches: int, args: argparse.Namespace) -> list[str]:
    """Compile a step; a row of the table."""
    start = time.process_time()
    pipe = Pipeline(
        [nnx.eval_shape(STAGES[args.stage]) for _ in range(mesh.size)],
        num_microbatches,
        schedule=schedule,
        mesh=mesh,
        loss_fn=LOSSES[args.loss],
        grad_dtype=None if args.grad_dtype == "default" else args.grad_dtype,
    )
    compiled = tpu.lower(pipe, (num_microbatches * ROWS, WIDTH)).compile()
    sizes = compiled.memory_analysis()
    columns = (
        sizes.temp_size_in_bytes,
        predict(pipe.plan, *pipe.plan.facts.last).temporaries,
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
    )
    return [
        schedule,
        str(num_microbatches),
        str(pipe.plan.training.num_buffers),
        *(f"{column / GIB:.3f}" for column in columns),
        f"{time.process_time() - start:.0f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schedules", nargs="*", default=["1f1b", "eager_1f1b", "zb_h1", "gpipe"])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[32])
    parser.add_argument("--stage", choices=sorted(STAGES), default="loop")
    parser.add_argument("--loss", choices=sorted(LOSSES), default="mean")
    parser.add_argument("--grad-dtype", default="weights", help="'default' for float32")
    args = parser.parse_args()
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    mesh = tpu.mesh("v5e:2x4")
    print(f"v5e 2x4, GiB on a rank, {args.stage} over layers, loss a {args.loss}", flush=True)
    rows = [row(mesh, name, m, args) for m in args.microbatches for name in args.schedules]
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
