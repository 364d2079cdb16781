"""One program on two hosts; here two processes on this machine stand for them.

    python -m pipeline launch --processes 2 --devices-per-process 2 -- examples/recipes/two_hosts.py

On two real hosts, of which the first is 10.0.0.1, start it on each:

    export SHARDPIPE_COORDINATOR=10.0.0.1:8476 SHARDPIPE_PROCESSES=2
    SHARDPIPE_PROCESS=0 python two_hosts.py    # and 1 on the other
"""

import jax
import numpy as np
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, initialize, local_rows, make_optimizer, shard_batch

ROWS, STEPS = 32, 5


def loss_fn(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean square."""
    return ((outputs - targets) ** 2).mean()


@nnx.jit
def train_step(
    pipe: Pipeline, optimizer: nnx.Optimizer, inputs: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = pipe.value_and_grad(inputs, targets)
    optimizer.update(pipe, grads)
    return loss


def main() -> list[float]:
    """Train; process 0 prints."""
    here = initialize()  # alone, it is process 0 of 1
    mesh = make_mesh(data=2 if len(jax.devices()) > 1 else 1, stage=None)
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(4)]  # the same seeds everywhere
    pipe = Pipeline(stages, 4, mesh=mesh, loss_fn=loss_fn)
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))
    mine = local_rows(mesh, ROWS)
    losses = []
    for step in range(STEPS):
        batch = np.random.default_rng(step).normal(size=(2, ROWS, 8)).astype(np.float32)
        inputs, targets = shard_batch((batch[0, mine], batch[1, mine]), mesh)  # own rows only
        losses.append(float(train_step(pipe, optimizer, inputs, targets)))
        if here.index == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if here.index == 0:
        sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
        print(f"{jax.process_count()} processes, {len(jax.devices())} devices, {sizes}", flush=True)
    return losses


if __name__ == "__main__":
    main()
