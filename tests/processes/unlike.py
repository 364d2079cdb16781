"""Ranks with unlike meshes on several processes, as the tests run it under the launcher.

python unlike.py FOLDER MESHES LAST [DIES]

It trains up to step LAST, from a checkpoint in FOLDER if there is one, and saves there at the end.
Process 0 writes the losses to FOLDER/losses.json. With DIES, the last process kills itself there.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from pipeline import Pipeline, initialize
from pipeline.optimizer import make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import DynamicScale, Step

# By rank, the first of its devices, and the sizes of its axes.
MESHES: dict[str, list[tuple[int, dict[str, int]]]] = {
    "wide": [(0, {"data": 2}), (4, {"data": 2, "tensor": 2}), (2, {"data": 2})],
    "other": [(0, {"tensor": 2}), (2, {"tensor": 4}), (6, {"tensor": 2})],
}


def make_step(name: str) -> Step:
    """An encoder, a decoder whose weights `tensor` divides, and a last stage."""
    from tests.support import models, tensor_stages

    devices = np.array(jax.devices())
    meshes = [
        Mesh(devices[first : first + math.prod(of.values())].reshape(tuple(of.values())), tuple(of))
        for first, of in MESHES[name]
    ]
    stages = [tensor_stages.Parallel(nnx.Rngs(k)) for k in range(2)]
    pipe = Pipeline(
        [models.Block(nnx.Rngs(5)), *stages],
        4,
        embed=models.Words(nnx.Rngs(2)),
        head=models.Readout(nnx.Rngs(3)),
        loss_fn=lambda y, t: (models.cross_entropy(y, t), {"rows": len(t)}),
        engine="programs",
        stage_meshes=meshes,
    )
    tx = optax.chain(optax.add_noise(1e-4, 0.55, key=jax.random.key(0)), optax.adamw(1e-2))
    optimizer = make_optimizer(pipe, tx)
    options = {"clip": 0.5, "ema": 0.9, "loss_scale": DynamicScale(), "has_aux": True}
    return Step(pipe, optimizer, **options)


def train(step: Step, first: int, last: int) -> list[float]:
    found = []
    for n in range(first, last):
        draw = np.random.default_rng(n)
        metrics = step(draw.integers(0, 11, 16), draw.integers(0, 5, 16))
        found.append(float(metrics.loss))
        assert int(metrics.aux["rows"]) == 16
    return found


def main(folder: Path, name: str, last: int, *, dies: bool) -> None:
    here = initialize(config=name, timeout=600, heartbeat=20)
    with jax.numpy_dtype_promotion("standard"):
        step = make_step(name)
        shaped, plain = step.shaped(), step.plain()
        with Checkpoints(folder / "saved") as checkpoints:
            parts = {"shaped": shaped, "plain": plain}
            first = checkpoints.restore(step.model, step.optimizer, **parts)
            if first is not None:
                step.load(shaped, plain)
            losses = train(step, first or 0, last)
            parts = {"shaped": step.shaped(), "plain": step.plain()}
            checkpoints.save(last, step.model, step.optimizer, **parts)
    if here.index == 0:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    if dies and here.index == here.count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        train(step, last, last + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), dies="dies" in sys.argv)
