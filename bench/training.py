"""Costs of the trainer beside its devices: ``python -m bench.training``.

Host: the loop with all it does (batches, records, hooks), where the compiled step is one that gives
its arguments back, so that next to nothing runs on the device; processor time, which other
processes of the machine do not lengthen much. Memory: a run of 2,000 steps of a pipeline of two
ranks, what the process holds after step 200 and at its end. Fails where a step takes the host more
than 2 ms (2% of 100 ms) or memory grows by 1%.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training import timing
from pipeline.training.records import JsonLines
from pipeline.training.step import Metrics, Step
from pipeline.training.trainer import Trainer

STEPS, SETTLED = 2000, 200
MOST_HOST, MOST_GROWTH = 2e-3, 0.01
WIDTH, ROWS = 16, 8


def pipeline(stages: int, ranks: int) -> Pipeline:
    made = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)) for k in range(stages)]
    loss_fn = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    return Pipeline(made, 2, mesh=make_mesh(stage=ranks), loss_fn=loss_fn)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    while True:
        yield rows, rows


def make_trainer(pipe: Pipeline, steps: int, folder: Path, **options: Any) -> Trainer:
    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-3)), clip=1.0, ema=0.999)
    log = JsonLines(folder / "log.jsonl")
    return Trainer(step, batches(), steps=steps, recorders=[log], **options)


def host_seconds(stages: int, folder: Path, steps: int = 300) -> tuple[float, int]:
    """Median processor seconds of a step, and the number of arrays that it is given."""
    times: list[float] = []
    trainer = make_trainer(
        pipeline(stages, 1), steps, folder, hooks=[lambda *_: times.append(time.process_time())]
    )
    step = trainer.step
    numbers = Metrics(*(jnp.zeros(()) for _ in Metrics._fields))
    numbers = numbers._replace(finite=jnp.ones((), bool), in_a_row=jnp.zeros((), int))

    def back(leaves: Any, mean: Any, carry: Any, *_: Any) -> Any:
        return leaves, mean, carry, numbers

    step._fused = jax.jit(back, donate_argnums=(0, 1, 2))  # noqa: SLF001
    trainer.run()
    trainer.close()
    return statistics.median(np.diff(times[20:])), len(step._leaves())  # noqa: SLF001


def growth(folder: Path, steps: int = STEPS) -> tuple[int, int]:
    """Bytes of the process after `SETTLED` steps, and at the end."""
    held: dict[int, int] = {}

    def look(_: Trainer, record: Any) -> None:
        if record["step"] in (SETTLED, steps):
            gc.collect()
            held[record["step"]] = timing.resident() or 0

    trainer = make_trainer(pipeline(2, 2), steps, folder, hooks=[look])
    trainer.run()
    trainer.close()
    return held[SETTLED], held[steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the long run (2000)")
    steps = parser.parse_args().steps
    fits = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stages in (1, 8, 32):
            seconds, arrays = host_seconds(stages, folder)
            fits &= seconds < MOST_HOST
            print(
                f"{stages:3} stages, {arrays} arrays: {1e3 * seconds:.2f} ms of the host for a "
                f"step, {seconds / 0.1:.2%} of 100 ms"
            )
        before, after = growth(folder, steps)
    grown = after / before - 1
    fits &= grown < MOST_GROWTH
    print(
        f"steps {SETTLED} to {steps}: {before / 2**20:.1f} to {after / 2**20:.1f} MiB, {grown:+.2%}"
    )
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
