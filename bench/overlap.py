"""Work during a message, as compiled for TPUs: ``python -m bench.overlap``.

Needs `libtpu`, in an environment of its own, and no TPU: a step is compiled for a topology, and its
scheduled program is read. For every exchange in the scan over ticks it prints how many of a slot's
actions (`while` loops) the compiler has put between its start and its end, without and with delayed
sends. Letters: S ranks, M microbatches, b rows of a microbatch, d and h the widths of an MLP.
"""

from __future__ import annotations

import argparse
import os
import re

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}.items():
    os.environ.setdefault(name, value)

import bench  # noqa: F401, E402  (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from collectives import DATA, STAGE  # noqa: E402
from pipeline import Pipeline  # noqa: E402

TOPOLOGY = "v5e:2x4"
S, M, ROWS, WIDTH, HIDDEN = 8, 32, 512, 1024, 4096
STEP = re.compile(
    r"^ +(?:ROOT )?%([\w.-]+) = .*?\b(collective-permute-(?:start|done)|while)\((.*)$"
)


class Stage(nnx.Module):
    """A residual MLP in bfloat16."""

    def __init__(self) -> None:
        self.up = nnx.Param(jnp.zeros((WIDTH, HIDDEN), jnp.bfloat16))
        self.down = nnx.Param(jnp.zeros((HIDDEN, WIDTH), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, d] to [b, d]."""
        return x + jax.nn.relu(x @ self.up[...]) @ self.down[...]


def mean_square(y: jax.Array, t: jax.Array) -> jax.Array:
    """A loss that costs next to nothing."""
    return jnp.mean(jnp.square((y - t).astype(jnp.float32)))


def compiled(schedule: str, *, delayed: bool) -> tuple[Pipeline, jax.stages.Compiled]:
    """A pipeline and its training step, for a topology that need not be there."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.array(devices).reshape(1, S), (DATA, STAGE), axis_types=(AxisType.Auto,) * 2)
    stages = [nnx.eval_shape(Stage) for _ in range(S)]
    pipe = Pipeline(stages, M, schedule=schedule, mesh=mesh, loss_fn=mean_square, delayed=delayed)
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    x = jax.ShapeDtypeStruct((M * ROWS, WIDTH), jnp.bfloat16, sharding=sharding)
    return pipe, pipe.lower(x, x).compile()


def beside(text: str) -> list[int]:
    """Loops between start and end of every exchange, in a scheduled program."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        steps = [match.groups() for match in map(STEP.match, computation.splitlines()) if match]
        for n, (name, kind, _) in enumerate(steps):
            if kind == "collective-permute-start":
                rest = steps[n + 1 :]
                ends = (k for k, (_, _, operands) in enumerate(rest) if f"%{name})" in operands)
                between = rest[: next(ends)]
                found.append(sum(kind == "while" for _, kind, _ in between))
    return found


def main() -> None:
    """Print a line for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="*", default=["eager_1f1b", "zb_h1", "1f1b"])
    print(
        f"{TOPOLOGY}, S={S}, M={M}, MLP {WIDTH}-{HIDDEN}, {ROWS} rows, bfloat16, jax "
        f"{jax.__version__}: actions beside each exchange of a tick"
    )
    for schedule in parser.parse_args().schedules:
        for delayed in (False, True):
            pipe, step = compiled(schedule, delayed=delayed)
            program, size = pipe.plan.training, step.memory_analysis().temp_size_in_bytes
            print(
                f"{schedule}, delayed={delayed}: {beside(step.as_text())} of "
                f"{[len(slot.ops) for slot in program.slots]} in slots {program.pattern}, "
                f"{program.num_ticks} ticks, {size:,} temporary bytes",
                flush=True,
            )


if __name__ == "__main__":
    main()
