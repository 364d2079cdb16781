"""Train a byte-level GPT on Python's standard library through a pipeline.

    python examples/train_gpt.py                  # 8 virtual CPU devices: data 2 x stage 4
    python examples/train_gpt.py --plain          # the same model and batches, no pipeline
    python examples/train_gpt.py --schedule gpipe --stages 8 --data 1

The folder ``--out`` gets timeline.png, loss.png, losses.json and ``state``, an Orbax checkpoint.
Exit status: 0; 1 when the loss is no longer finite; 2 for a bad option; 130 after Ctrl-C. State
is saved in every case but 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import baselines
import clocks
import command_line
import corpus
import devices
import gpt
import plots
import sample
import state
from collectives import make_mesh
from pipeline import Pipeline
from pipeline import make_optimizer as of_layers
from plain import Plain
from schedules import ScheduleError
from schedules.drawing.draw import save_timeline

Model = Pipeline | Plain

HELD_OUT_BATCHES = 32
PROMPT = b"def "
SAMPLE_BYTES = 300


class DivergedError(Exception):
    """The loss of a step is not finite."""


@dataclass
class Log:
    """What training leaves behind, also when it stops early."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    before: state.State = field(default_factory=dict)  # the state that the last step started from
    good: state.State = field(default_factory=dict)  # the latest that gave a finite loss

    def step_seconds(self) -> float:
        """Median over steps; the first compiles."""
        return float(np.median(self.seconds[1:] or self.seconds or [math.nan]))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = command_line.parse(argv)
    console = Console(highlight=False, markup=False)
    model = make_model(options)
    optimizer = make_optimizer(model, options)
    text = corpus.read()
    console.print(
        f"{text.files} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held "
        f"out; {sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))):,} parameters"
    )
    timing = None
    if isinstance(model, Pipeline):
        console.print(model.describe(), soft_wrap=True)
        timing = clocks.Timing.of(model, (rows_of(options), options.context, options.width))

    options.out.mkdir(parents=True, exist_ok=True)
    log = Log()
    try:
        train(model, optimizer, text.train, options, log, console, timing)
    except KeyboardInterrupt:
        return stop(options, log, f"interrupted in step {len(log.losses) + 1}", 130)
    except DivergedError as error:
        good = state.save(options.out / "state-good", log.good)
        remedy = f"{good} holds the last state with a finite loss; try a lower --learning-rate"
        return stop(options, log, f"{error}; {remedy}", 1)

    state.save(options.out / "state", state.snapshot(options.steps, model, optimizer))
    evaluate(model, text, options, log, console)
    if timing:
        for line in timing.table(1e3 * log.step_seconds(), devices.cores()):
            console.print(line)
        save_timeline(timing.reports, options.out / "timeline.png", title="One step, in ms")
    console.print(
        f"wrote {', '.join(sorted(p.name for p in options.out.iterdir()))} to {options.out}"
    )
    return 0


def make_model(options: argparse.Namespace) -> Model:
    """A pipeline on the devices that the options and the machine allow, or the plain model."""
    wanted = 1 if options.plain else options.device_count or options.stages * options.data
    pool = devices.start(wanted, threads=options.plain)
    sizes = gpt.Sizes(options.layers, options.width, options.heads, options.context)
    stages, embed, head = gpt.build(sizes, options.stages, options.seed)
    parts = {"embed": embed, "head": head, "loss_fn": gpt.loss_fn}
    if options.plain:
        return Plain(stages, num_microbatches=options.microbatches, **parts)
    command_line.check_devices(options, len(pool))
    ranks = devices.ranks(options.stages, options.data, len(pool))
    try:
        return Pipeline(
            stages,
            options.microbatches,
            schedule=options.schedule,
            mesh=make_mesh(stage=ranks, data=options.data, devices=pool),
            remat="stage" if options.remat == "stage" else None,
            **parts,
        )
    except (ScheduleError, OSError) as error:
        command_line.fail(f"--schedule {options.schedule}: {error}")


def rows_of(options: argparse.Namespace) -> int:
    """Sequences in a microbatch of one data shard."""
    return options.batch_size // (options.microbatches * options.data)


def make_optimizer(model: Model, options: argparse.Namespace) -> nnx.Optimizer:
    """AdamW with warm-up, cosine decay and a clipped global norm."""
    warm_up, peak = max(1, options.steps // 10), options.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        peak / warm_up, peak, warm_up, max(options.steps, warm_up + 1), end_value=peak / 20
    )
    adam = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    clip = optax.clip_by_global_norm(1.0)
    if isinstance(model, Pipeline):
        return of_layers(model, clip, adam)
    return nnx.Optimizer(model, optax.chain(clip, adam), wrt=nnx.Param)


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """One update; returns the loss before it."""
    loss, grads = model.value_and_grad(tokens, targets)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def held_out_loss(model: Model, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Forward only."""
    return model.loss(tokens, targets)


def train(
    model: Model,
    optimizer: nnx.Optimizer,
    text: corpus.Bytes,
    options: argparse.Namespace,
    log: Log,
    console: Console,
    timing: clocks.Timing | None,
) -> None:
    """All steps, below a progress bar.

    Raises:
      DivergedError: a loss is not finite.
    """
    bubble = f" · predicted bubble {timing.bubble:.1%}" if timing else ""
    text_column = TextColumn("{task.fields[status]}")
    columns = MofNCompleteColumn(), BarColumn(20), text_column, TimeRemainingColumn()
    shape = {"size": options.batch_size, "context": options.context}
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("train", total=options.steps, status="compiling")
        for step in range(options.steps):
            log.before = state.snapshot(step, model, optimizer)
            log.good = log.good or log.before
            start = time.perf_counter()
            batch = corpus.batch(text, step=step, seed=options.seed, **shape)
            loss = float(train_step(model, optimizer, *batch))
            log.seconds.append(time.perf_counter() - start)
            log.losses.append(loss)
            if not math.isfinite(loss):
                raise DivergedError(f"loss is {loss} in step {step + 1} of {options.steps}")
            log.good = log.before
            rate = options.batch_size * options.context / log.step_seconds()
            status = f"loss {loss:.3f} · {rate:,.0f} tokens/s{bubble}"
            progress.update(bar, advance=1, status=status)
            if not console.is_terminal and (step + 1) % max(1, options.steps // 10) == 0:
                console.print(f"step {step + 1}/{options.steps} · {status}")


def stop(options: argparse.Namespace, log: Log, why: str, status: int) -> int:
    """Save what there is and say so."""
    saved = state.save(options.out / "state", log.before)
    save_losses(options, log)
    print(f"stopped: {why}; {saved} holds the state before that step", file=sys.stderr)
    return status


def save_losses(options: argparse.Namespace, log: Log, **more: float) -> None:
    """Write losses.json, by which runs can be compared."""
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    content = {"options": settings, "losses": log.losses, "seconds": log.seconds, **more}
    (options.out / "losses.json").write_text(json.dumps(content, indent=1) + "\n")


def evaluate(
    model: Model,
    text: corpus.Corpus,
    options: argparse.Namespace,
    log: Log,
    console: Console,
) -> None:
    """Print held-out losses and a sample; save the losses and their curve."""
    count = HELD_OUT_BATCHES * options.batch_size
    tokens, targets = corpus.even_windows(text.held_out, count=count, context=options.context)
    batches = zip(
        np.split(tokens, HELD_OUT_BATCHES), np.split(targets, HELD_OUT_BATCHES), strict=True
    )
    levels = {
        "held-out": float(np.mean([held_out_loss(model, *batch) for batch in batches])),
        "bigram": baselines.bigram(text.train, tokens, targets),
        "unigram": baselines.unigram(text.train, targets),
    }
    console.print(f"held-out loss over {targets.size:,} bytes, in nats per byte")
    for name, level in levels.items():
        console.print(f"  {'this model' if name == 'held-out' else name:<10} {level:.4f}")

    written = sample.generate(
        model, PROMPT, length=SAMPLE_BYTES, context=options.context, seed=options.seed
    )
    console.rule("a sample")
    console.print(written.decode(errors="replace"))
    console.rule()
    save_losses(options, log, **levels)
    plots.save_losses(options.out / "loss.png", log.losses, levels)


if __name__ == "__main__":
    sys.exit(main())
