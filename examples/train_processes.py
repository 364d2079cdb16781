"""Train a small byte-level GPT in one process or several; each brings its own rows of the batch.

    python -m pipeline launch --processes 4 --devices-per-process 2 -- examples/train_processes.py
    python examples/train_processes.py --coordinator 10.0.0.1:8476 --processes 2 --process 0

The second line, with --process 1 on another host, is for two hosts; under SLURM, Open MPI, a
Kubernetes job or on a TPU pod no option is needed. The losses do not depend on the number of
processes, only on the mesh.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import corpus
import gpt
from pipeline import (
    ParallelConfig,
    Pipeline,
    initialize,
    local_rows,
    make_optimizer,
    shard_batch,
)


def parse(argv: list[str] | None = None) -> tuple[dict[str, Any], argparse.Namespace]:
    """Parse the place of this process, and the options that all processes share."""
    parser = argparse.ArgumentParser(description="Train a small GPT in several processes.")
    add = parser.add_argument
    add("--coordinator", help="host:port of process 0")
    add("--processes", type=int, help="how many")
    add("--process", type=int, help="this one's number, from 0")
    add("--stages", type=int, default=4, help="slices of the model (4)")
    add("--data", type=int, default=1, help="data-parallel copies of the pipeline (1)")
    add("--microbatches", type=int, default=4, help="parts of each data shard's rows (4)")
    add("--steps", type=int, default=30, help="training steps (30)")
    add("--width", type=int, default=32, help="of the residual stream (32)")
    add("--schedule", help="a family or a CSV timetable; Pipeline chooses if there is none")
    add("--compute-dtype", help="what is computed in, such as bfloat16 (as the parameters)")
    add("--losses", type=Path, help="a file for the losses")
    options = parser.parse_args(argv)
    place = {"coordinator": options.coordinator, "num_processes": options.processes}
    place["process_id"] = options.process
    for name in ("coordinator", "processes", "process"):
        delattr(options, name)
    return place, options


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    place, options = parse(argv)
    here = initialize(**place, config=options)
    losses = []
    for loss in train(options):
        losses.append(loss)
        if here.index == 0:
            print(f"step {len(losses)}: loss {loss:.4f}", flush=True)
    if options.losses and here.index == 0:
        options.losses.write_text(json.dumps(losses), encoding="utf-8")
    return 0


@nnx.jit
def train_step(
    model: Pipeline, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = model.value_and_grad(tokens, targets)
    optimizer.update(model, grads)
    return loss


def train(options: argparse.Namespace) -> Iterator[float]:
    """The loss of every step."""
    sizes = gpt.Sizes(options.stages, options.width, heads=2, context=32)
    stages, embed, head = gpt.build(sizes, options.stages, seed=0)
    devices = len(jax.devices())
    if not 1 <= options.data <= devices:
        raise SystemExit(
            f"--data {options.data}: must be between 1 and the number of devices, {devices}; "
            f"virtual CPU devices are made by XLA_FLAGS=--xla_force_host_platform_device_count=8, "
            f"or by python -m pipeline launch --devices-per-process 8"
        )
    ranks = max(s for s in range(1, devices // options.data + 1) if fits(options, s))
    config = ParallelConfig(
        stage=ranks,
        data=options.data,
        num_microbatches=options.microbatches,
        microbatch_size=2,
        compute_dtype=options.compute_dtype,
    )
    model = Pipeline(
        stages,
        schedule=options.schedule,
        embed=embed,
        head=head,
        loss_fn=gpt.loss_fn,
        **config.pipeline_options(),
    )
    clip = optax.clip_by_global_norm(1.0)
    optimizer = make_optimizer(model, clip, optax.adamw(3e-3))
    mesh, size = model.mesh, config.batch_size
    mine = local_rows(mesh, size)
    text = corpus.read().train
    for step in range(options.steps):
        batch = corpus.batch(text, step=step, seed=0, size=size, context=sizes.context)
        tokens, targets = shard_batch(tuple(part[mine] for part in batch), mesh)
        yield float(train_step(model, optimizer, tokens, targets))


def fits(options: argparse.Namespace, ranks: int) -> bool:
    """Tell whether so many ranks can share the stages."""
    return options.stages % ranks == 0


if __name__ == "__main__":
    sys.exit(main())
