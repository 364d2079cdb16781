"""A run that may be killed: python survivor.py FOLDER STEPS EVERY PAUSE [STUCK], also launched.

It goes on from the newest checkpoint in FOLDER, saves every so many steps, writes each step to
standard output and its parameters to FOLDER.npz at the end. With STUCK the last process leaves the
loop at that step without a word, and the others wait for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, initialize, make_optimizer, shard_batch
from pipeline.processes import local_rows
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.faults import Watchdog, stop_on_signals
from tests.support.models import WIDTH, Noisy

ROWS = 8


class Data:
    """Batches of random rows, and where one is among them."""

    def __init__(self) -> None:
        self.place = 0

    def get_state(self) -> dict[str, int]:
        return {"place": self.place}

    def set_state(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __next__(self) -> Any:
        self.place += 1
        return np.random.default_rng(self.place).normal(size=(2, ROWS, WIDTH)).astype(np.float32)


def model() -> tuple[Pipeline, nnx.Optimizer]:
    """On all devices of two processes, or on two of one."""
    rngs = nnx.Rngs(0)
    pipe = Pipeline(
        [Noisy(rngs) for _ in range(2)],
        2,
        schedule="1f1b",
        mesh=make_mesh(stage=2, data=jax.device_count() // 2 if jax.process_count() > 1 else 1),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
    )
    return pipe, make_optimizer(pipe, optax.adamw(1e-2))


@nnx.jit
def train_step(pipe: Pipeline, optimizer: nnx.Optimizer, x: jax.Array, t: jax.Array) -> jax.Array:
    loss, grads = pipe.value_and_grad(x, t)
    optimizer.update(pipe, grads)
    return loss


def run(folder: Path, steps: int, every: int, pause: float = 0.0, stuck: int = -1) -> Any:
    """The parameters at the end, or None if it was asked to stop before."""
    pipe, optimizer = model()
    data = Data()
    mine = local_rows(pipe.mesh, ROWS)
    with (
        stop_on_signals() as stop,
        Checkpoints(folder, keep=2) as checkpoints,
        Watchdog(60.0 if stuck < 0 else 3.0, pipe.mesh) as dog,
    ):
        first = checkpoints.restore(pipe, optimizer, data=data) or 0
        for step in range(first, steps):
            if stop.requested(step):
                checkpoints.save(step, pipe, optimizer, data=data)
                say(f"stopped before {step}")
                return None
            if step == stuck and jax.process_index() == jax.process_count() - 1:
                time.sleep(60)
            dog.beat(step)
            x, t = next(data)
            loss = train_step(pipe, optimizer, *shard_batch((x[mine], t[mine]), pipe.mesh))
            say(f"step {step} {float(loss)}")
            time.sleep(pause)
            if (step + 1) % every == 0:
                checkpoints.save(step + 1, pipe, optimizer, data=data)
    return nnx.to_pure_dict(nnx.state((pipe, optimizer)))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: str, steps: str, every: str, pause: str, stuck: str = "-1") -> None:
    initialize()
    found = run(Path(folder), int(steps), int(every), float(pause), int(stuck))
    if found is not None and jax.process_count() == 1:
        leaves = [numbers(leaf) for leaf in jax.tree.leaves(found)]
        np.savez(f"{folder}.npz", *leaves)


def numbers(leaf: Any) -> np.ndarray:
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


if __name__ == "__main__":
    main(*sys.argv[1:])
