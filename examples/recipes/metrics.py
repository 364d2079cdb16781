"""Metrics of a run for TensorBoard, and for wandb's offline mode where wandb is installed.

    pip install ".[training]"
    python examples/recipes/metrics.py [folder]
    tensorboard --logdir folder

A recorder is any object with `write(record)` and `close()`, so another service takes ten lines.
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from pipeline import Pipeline, make_optimizer
from pipeline.training.records import JsonLines, Record, TensorBoard
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer

STEPS = 12


class Wandb:
    """A recorder for wandb, offline: `wandb sync` sends the folder later, if you want to."""

    def __init__(self, folder: Path) -> None:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        self._run = wandb.init(project="shardpipe", dir=str(folder), mode="offline")

    def write(self, record: Record) -> None:
        """Send the numbers of a step."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=int(record["step"]))

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def main(folder: str | None = None) -> dict[str, Any]:
    """Train a few steps, and list what was written."""
    place = Path(folder or tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=True)
    stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(4)]
    pipe = Pipeline(stages, 4, loss_fn=lambda y, t: ((y - t) ** 2).mean())
    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-2)), clip=1.0)
    data = [tuple(jax.random.normal(jax.random.key(n), (2, 16, 8))) for n in range(STEPS)]
    recorders: list[Any] = [TensorBoard(place / "events"), JsonLines(place / "run.jsonl")]
    if find_spec("wandb"):
        recorders.append(Wandb(place))
    trainer = Trainer(step, data, steps=STEPS, recorders=recorders)
    trainer.run()
    for recorder in recorders:
        recorder.close()
    lines = (place / "run.jsonl").read_text(encoding="utf-8").splitlines()
    print(lines[-1])
    files = sorted(path.name for path in place.iterdir())
    print(f"in {place}: {', '.join(files)}")
    return {
        "steps": len(trainer.losses),
        "files": files,
        "events": list((place / "events").iterdir()),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
