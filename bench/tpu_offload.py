"""Copies of stashes to host memory by the TPU compiler: ``python -m bench.tpu_offload v6e:2x2``.

Four ranks have one MLP layer each, and all stashes that outlive the next action lie on the host.
The step is compiled for slices that are described and not there. Beside the bytes of both memories
stand the asynchronous copies, and how many of them travel beside work. What is printed stands in
docs/offload.md. Needs `libtpu` and no TPU; a slice takes about a minute of a core.
"""

from __future__ import annotations

import argparse

from bench import tpu  # before jax
from bench.hlo import host_copies
from bench.measure import table

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from collectives import make_mesh
from pipeline import Pipeline

MIB = 2**20
RANKS, MICROBATCHES = 4, 8
HEADER = ["slice", "device temporaries, MiB", "on the host", "pairs of copies", "beside work"]


class Layer(nnx.Module):
    """A residual MLP of zeros, which no program reads."""

    def __init__(self, width: int):
        self.up = nnx.Param(jnp.zeros((width, 4 * width), jnp.bfloat16))
        self.down = nnx.Param(jnp.zeros((4 * width, width), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(x @ self.up[...]) @ self.down[...]


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A mean in float32."""
    return jnp.mean(jnp.square((outputs - targets).astype(jnp.float32)))


def row(topology: str, width: int, rows: int) -> list[str]:
    """Compile a step; a row of the table."""
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    pipe = Pipeline(
        [nnx.eval_shape(lambda: Layer(width)) for _ in range(RANKS)],
        MICROBATCHES,
        schedule="1f1b",
        mesh=make_mesh(devices=slice_.devices[:RANKS], stage=RANKS),
        remat=None,
        offload="stash",
        loss_fn=mean_square,
    )
    x = jax.ShapeDtypeStruct((MICROBATCHES * rows, width), jnp.bfloat16)
    compiled = pipe.lower(x, x).compile()
    said = compiled.memory_analysis()
    sizes = said.temp_size_in_bytes, said.host_temp_size_in_bytes
    pairs = host_copies(compiled.as_text() or "")
    return [topology, *(f"{size / MIB:.0f}" for size in sizes), *map(str, pairs)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topologies", nargs="*", default=["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    parser.add_argument("--width", type=int, default=1024, help="(1024)")
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch (2048)")
    options = parser.parse_args()
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    tpu.prepare()
    print(f"jax {jax.__version__}, width {options.width}, {options.rows} rows a microbatch")
    rows = [row(topology, options.width, options.rows) for topology in options.topologies]
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
