"""The command line of `train_gpt.py`: options, their rules, and one-line errors."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import schedules


class Parser(argparse.ArgumentParser):
    """argparse without the usage text above its errors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options, checked; `layers` is filled in.

    Raises:
      SystemExit: status 2, after one line that names option, value, rule and remedy.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"{unknown[0]} is not an option; --help lists them")
    options.layers = options.layers or -(-4 // options.stages) * options.stages
    for problem in _problems(options):
        parser.error(problem)
    return options


def check_devices(options: argparse.Namespace, available: int) -> None:
    """Fail if the machine has fewer devices than the options need."""
    if options.data > available:
        fail(
            f"--data {options.data} needs as many devices, but there are {available}; "
            f"use --data {available} or --device-count {options.data}"
        )
    if (options.device_count or 0) > available:
        fail(
            f"--device-count {options.device_count} is more than the {available} devices there "
            f"are; use --device-count {available}, or JAX_PLATFORMS=cpu for virtual ones"
        )


def fail(message: str) -> NoReturn:
    """End as for any other bad option."""
    _parser().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train_gpt.py",
        description="Train a byte-level GPT on Python's standard library through a pipeline.",
        epilog="It runs on virtual CPU devices unless JAX_PLATFORMS names another platform.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stages", type=_whole(1), default=4, help="slices of the model")
    add("--data", type=_whole(1), default=2, help="data-parallel copies of the pipeline")
    add("--microbatches", type=_whole(1), default=16, help="parts of each batch")
    families = ", ".join(schedules.names())
    add("--schedule", help=f"{families}, or a CSV timetable; None: Pipeline chooses")
    add("--remat", type=_remat, default="stage", help="stage: recompute it in B; none: keep all")
    add("--steps", type=_whole(1), default=240, help="training steps")
    add("--device-count", type=_whole(1), help="devices to use; None: stages x data")
    add("--out", type=Path, help="folder for pictures and state; None: out, then out/run-2, ...")
    add("--seed", type=_whole(0), default=0, help="of weights, batches and sample")
    add("--plain", action="store_true", help="the same model and data without a pipeline")
    add("--layers", type=_whole(1), help="None: 4, rounded up to a multiple of stages")
    add("--width", type=_whole(1), default=96, help="of the residual stream")
    add("--heads", type=_whole(1), default=4, help="attention heads")
    add("--context", type=_whole(2), default=128, help="bytes the model sees")
    add("--batch-size", type=_whole(1), default=32, help="sequences per step")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--learning-rate", type=_positive, default=6e-3, help="peak of the schedule")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return value

    return convert


def _remat(text: str) -> str:
    if text not in ("stage", "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'stage' nor 'none'; choose one")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number > 0, such as 3e-3")
    return value


def _problems(o: argparse.Namespace) -> Iterator[str]:
    """List the faults of options that are valid alone but not together."""
    if o.layers % o.stages:
        yield (
            f"--layers {o.layers} is not a multiple of --stages {o.stages}: stages are equal; "
            f"use --layers {_near(o.layers, o.stages)}"
        )
    if o.width % (2 * o.heads):
        yield (
            f"--width {o.width} is not a multiple of 2 x --heads {o.heads}: every head has an "
            f"even width; use --width {_near(o.width, 2 * o.heads)}"
        )
    parts = o.microbatches * o.data
    if o.batch_size % parts:
        yield (
            f"--batch-size {o.batch_size} is not a multiple of --microbatches {o.microbatches} x "
            f"--data {o.data} = {parts}: its parts are equal; "
            f"use --batch-size {_near(o.batch_size, parts)}"
        )
    if o.out is not None and o.out.exists() and not o.out.is_dir():
        yield f"--out {o.out} is a file: results go into a folder; choose another name"


def _near(value: int, unit: int) -> str:
    """The multiples of unit on either side of value."""
    lower = value // unit * unit
    return " or ".join(str(near) for near in (lower, lower + unit) if near)
