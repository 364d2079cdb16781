"""Train a byte-level GPT on Python's standard library through a pipeline.

    python examples/train_gpt.py                  # 8 virtual CPU devices: data 2 x stage 4
    python examples/train_gpt.py --plain          # the same model and batches, no pipeline
    python examples/train_gpt.py --schedule gpipe --stages 8 --data 1
    python examples/train_gpt.py --resume         # go on where a run was stopped

The folder ``--out`` gets timeline.png, loss.png, losses.json and ``state``, the run's checkpoints.
Exit status: 0; 1 when the loss is no longer finite; 2 for a bad option; 130 after Ctrl-C and 143
after SIGTERM. State is saved in every case but 2. `gpt.toml` is the same job as a configuration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import baselines
import clocks
import command_line
import corpus
import devices
import gpt
import gpt_run
import plots
from collectives import make_mesh
from pipeline import Pipeline
from pipeline import make_optimizer as of_layers
from pipeline.training.checkpoints import CheckpointError, Checkpoints
from pipeline.training.faults import stop_on_signals
from pipeline.training.generation import continue_prompt
from pipeline.training.records import Progress
from pipeline.training.step import NotFiniteError, Step
from pipeline.training.trainer import Trainer, means
from plain import Plain
from schedules import ScheduleError
from schedules.drawing.draw import save_timeline

Model = Pipeline | Plain

HELD_OUT_BATCHES = 32
PROMPT = b"def "
SAMPLE_BYTES = 300
OUT, PICTURES = Path("out"), ("loss.png", "timeline.png")
EXITS = {"SIGINT": 130, "SIGTERM": 143}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = command_line.parse(argv)
    console = Console(highlight=False, markup=False)
    model = make_model(options)
    text = corpus.read()
    console.print(
        f"{text.files} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held "
        f"out; {sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))):,} parameters"
    )
    timing = None
    if isinstance(model, Pipeline):
        timing = clocks.Timing.of(model, (rows_of(options), options.context, options.width))
        model = timing.pipe
        console.print(model.describe(), soft_wrap=True)

    log = Losses(options)
    bar = Progress(options.steps, console=console)
    with stop_on_signals() as stop, open_checkpoints(options) as checkpoints:
        trainer = make_trainer(
            model,
            text,
            options,
            checkpoints=checkpoints,
            checkpoint_interval=log.interval,
            recorders=[bar],
            hooks=[log],
            stop=stop,
        )
        try:
            log.start(trainer.resume() if options.resume else None)
            ended = trainer.run()
        except NotFiniteError as error:
            remedy = "try a lower --learning-rate"
            return end(options, log, trainer, f"{error}; {remedy}", 1)
        finally:
            bar.close()
    if not ended:
        given = [one for one in (sys.argv[1:] if argv is None else argv) if one != "--resume"]
        if not any(one.startswith("--out") for one in given):
            given += ["--out", str(options.out)]
        how = shlex.join([sys.executable or "python", str(Path(__file__)), *given, "--resume"])
        why = f"{stop.reason} after step {trainer.done} of {options.steps}; go on with: {how}"
        return end(options, log, trainer, why, EXITS[stop.reason])

    evaluate(trainer, text, options, log, console)
    if timing:
        seconds = np.median(trainer.seconds[1:] or trainer.seconds or [math.nan])
        for line in timing.table(1e3 * float(seconds), devices.cores()):
            console.print(line)
        picture = options.out / "timeline.png"
        save_timeline(timing.reports[-1:], picture, title="One step, predicted", unit="ms")
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


def make_trainer(
    model: Model, text: corpus.Corpus, options: argparse.Namespace, **more: Any
) -> Trainer:
    """AdamW with warm-up, cosine decay and a clipped global norm, over random windows."""
    warm_up, peak = max(1, options.steps // 10), options.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        peak / warm_up, peak, warm_up, max(options.steps, warm_up + 1), end_value=peak / 20
    )
    adam = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    optimizer: Any
    if isinstance(model, Pipeline):
        optimizer = of_layers(model, adam)
    else:
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    sizes = {"batch_size": options.batch_size, "context": options.context}
    return Trainer(
        Step(model, optimizer, clip=1.0),
        gpt_run.batches(text.train, seed=options.seed, **sizes),
        steps=options.steps,
        stop_after=1,
        **more,
    )


def open_checkpoints(options: argparse.Namespace) -> Checkpoints:
    """Open the checkpoints of the run in ``--out``, by default the next free folder."""
    if options.out is None:
        options.out = folder_of(resume=options.resume)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(options.out / "state")
    except (ValueError, OSError, CheckpointError) as error:
        command_line.fail(f"--out {options.out}: {error}")
    if checkpoints.steps and not options.resume:
        command_line.fail(
            f"--out {options.out} holds a run of {checkpoints.steps[-1]} steps: go on with "
            f"--resume, or name another folder"
        )
    for name in PICTURES:  # of an end that this run has yet to reach
        (options.out / name).unlink(missing_ok=True)
    return checkpoints


def folder_of(*, resume: bool) -> Path:
    """Choose a run's folder if none is given: the first free one, or the last one for resume."""
    numbered = (OUT if n == 1 else OUT / f"run-{n}" for n in itertools.count(1))
    taken = list(itertools.takewhile(lambda path: (path / "state").exists(), numbered))
    if resume and taken:
        return taken[-1]
    return OUT / f"run-{len(taken) + 1}" if taken else OUT


class Losses:
    """The losses of all steps, kept in losses.json, by which runs can be compared."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.interval = max(1, options.steps // 10)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def start(self, done: int | None) -> None:
        """Take over what a run that goes on after that step has written."""
        path = self.options.out / "losses.json"
        if done and path.exists():
            kept = json.loads(path.read_text())
            self.losses, self.seconds = kept["losses"][:done], kept["seconds"][:done]

    def __call__(self, _: Trainer, record: Any) -> None:
        self.losses.append(record["loss"])
        self.seconds.append(record["seconds"]["step"])
        if record["step"] % self.interval == 0:
            self.save()

    def save(self, **more: float) -> None:
        """Write the file."""
        unwritten = ("out", "resume")
        settings = {k: value for k, value in vars(self.options).items() if k not in unwritten}
        content = {"options": settings, "losses": self.losses, "seconds": self.seconds, **more}
        (self.options.out / "losses.json").write_text(json.dumps(content, indent=1) + "\n")


def end(options: argparse.Namespace, log: Losses, trainer: Trainer, why: str, status: int) -> int:
    """Save what there is and say so."""
    trainer.save()
    trainer.close()
    log.save()
    print(f"stopped: {why}; {options.out / 'state'} holds the state", file=sys.stderr)
    return status


def evaluate(
    trainer: Trainer,
    text: corpus.Corpus,
    options: argparse.Namespace,
    log: Losses,
    console: Console,
) -> None:
    """Print held-out losses and a sample; save the losses and their curve."""
    model: Any = trainer.step.model
    sizes = {"batch_size": options.batch_size, "context": options.context}
    batches = gpt_run.held_out(count=HELD_OUT_BATCHES, **sizes)
    tokens, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    levels = {
        "held-out": means(trainer.step, batches)[0],
        "bigram": baselines.bigram(text.train, tokens, targets),
        "unigram": baselines.unigram(text.train, targets),
    }
    console.print(f"held-out loss over {targets.size:,} bytes, in nats per byte")
    for name, level in levels.items():
        console.print(f"  {'this model' if name == 'held-out' else name:<10} {level:.4f}")

    how: dict[str, Any] = {"temperature": 0.8, "seed": options.seed}
    if isinstance(model, Plain):  # the stages of a pipeline remember as far as they have learned to
        how["context"] = options.context
    written = continue_prompt(model, PROMPT, length=SAMPLE_BYTES, **how)
    console.rule("a sample")
    console.print(bytes(written).decode(errors="replace"))
    console.rule()
    log.save(**levels)
    plots.save_losses(options.out / "loss.png", log.losses, levels)


if __name__ == "__main__":
    sys.exit(main())
