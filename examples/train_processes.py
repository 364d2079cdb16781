"""Train a small byte-level GPT in one process or several; each brings its own rows of the batch.

    python -m pipeline launch --processes 4 --devices-per-process 2 -- examples/train_processes.py
    python examples/train_processes.py --coordinator 10.0.0.1:8476 --processes 2 --process 0

The second line, with --process 1 on another host, is for two hosts; under SLURM, Open MPI, a
Kubernetes job or on a TPU pod no option is needed. The losses do not depend on the number of
processes, only on the mesh. With --checkpoints the same command goes on where the last run ended,
on any number of processes; a run that is asked to stop saves its state and exits with 143.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.faults import Watchdog, stop_on_signals

STOPPED = 143  # the exit code of a run that was asked to stop, as a shell gives it after SIGTERM


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
    add("--losses", type=Path, help="a file, to which every step adds [step, loss] on a line")
    add("--checkpoints", type=Path, help="a folder that all processes share: a run there goes on")
    add("--every", type=int, default=10, help="steps from one checkpoint to the next (10)")
    add("--stuck-after", type=float, default=300.0, help="seconds that a step may take (300)")
    add("--heartbeat", type=float, default=40.0, help="seconds until a silent process is lost (40)")
    add(
        "--timeout", type=float, default=300.0, help="seconds to wait for the other processes (300)"
    )
    options = parser.parse_args(argv)
    place = {"coordinator": options.coordinator, "num_processes": options.processes}
    place["process_id"] = options.process
    for name in ("coordinator", "processes", "process"):
        delattr(options, name)
    return place, options


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit status."""
    place, options = parse(argv)
    watch = {"timeout": options.timeout, "heartbeat": options.heartbeat}
    here = initialize(**place, **watch, config=options)
    for step, loss in train(options):
        if here.index == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
            if options.losses:
                with options.losses.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps([step, loss])}\n")
    return 0


@nnx.jit
def train_step(
    model: Pipeline, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = model.value_and_grad(tokens, targets)
    optimizer.update(model, grads)
    return loss


def train(options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """The number of every step, from 1, and its loss; until the last, or a request to stop."""
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
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        dog = stack.enter_context(Watchdog(options.stuck_after, mesh))
        checkpoints, saved, step = None, 0, 0
        if options.checkpoints:
            checkpoints = stack.enter_context(Checkpoints(options.checkpoints))
            saved = step = checkpoints.restore(model, optimizer) or 0
        while step < options.steps and not stop.requested(step):
            dog.beat(step + 1)
            batch = corpus.batch(text, step=step, seed=0, size=size, context=sizes.context)
            tokens, targets = shard_batch(tuple(part[mine] for part in batch), mesh)
            loss = float(train_step(model, optimizer, tokens, targets))
            dog.rest()
            step += 1
            yield step, loss
            if checkpoints is not None and step % options.every == 0:
                checkpoints.save(step, model, optimizer)
                saved = step
        if checkpoints is not None and step > saved:
            checkpoints.save(step, model, optimizer)
    if stop.reason:
        raise SystemExit(STOPPED)


def fits(options: argparse.Namespace, ranks: int) -> bool:
    """Tell whether so many ranks can share the stages."""
    return options.stages % ranks == 0


if __name__ == "__main__":
    sys.exit(main())
