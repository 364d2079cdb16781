"""Data by grain, with a position that a checkpoint saves: a run that was cut goes on where it was.

    pip install ".[training]"
    python examples/recipes/data_by_grain.py

The run is made twice: in one go, and in two halves with a restore between them. The losses agree.
"""

import tempfile
from pathlib import Path

import grain
import numpy as np
import optax
from flax import nnx

from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer

ROWS, STEPS = 16, 8


def example(number: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of inputs and targets; reading a file would stand here."""
    x = np.random.default_rng(number).normal(size=8).astype(np.float32)
    return x, np.roll(x, 1)


def data() -> grain.DatasetIterator:
    """Shuffled, repeated, in batches; its iterator has get_state and set_state."""
    source = grain.MapDataset.range(64).shuffle(seed=3).repeat().map(example).batch(ROWS)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(source.to_iter_dataset(options))


def make_trainer(steps: int, checkpoints: Checkpoints | None = None) -> Trainer:
    """A fresh model, optimizer and iterator."""
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(4)]
    pipe = Pipeline(stages, 4, loss_fn=lambda y, t: ((y - t) ** 2).mean())
    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)))
    saved = {"checkpoints": checkpoints, "checkpoint_interval": STEPS // 2} if checkpoints else {}
    return Trainer(step, data(), steps=steps, **saved)


def main() -> dict[str, list[float]]:
    """Run in one go, and in two halves."""
    whole = make_trainer(STEPS)
    whole.run()
    folder = Path(tempfile.mkdtemp()) / "run"
    with Checkpoints(folder) as checkpoints:
        first = make_trainer(STEPS // 2, checkpoints)
        first.run()
    with Checkpoints(folder) as checkpoints:
        second = make_trainer(STEPS, checkpoints)
        second.resume()
        second.run()
    halves = [float(loss) for loss in (*first.losses, *second.losses)]
    losses = [float(loss) for loss in whole.losses]
    for step, pair in enumerate(zip(losses, halves, strict=True)):
        print(f"step {step}  in one go {pair[0]:.5f}  in two halves {pair[1]:.5f}")
    return {"whole": losses, "halves": halves}


if __name__ == "__main__":
    main()
