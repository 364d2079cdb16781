"""The command line: ``python -m pipeline launch|plan|train|eval|generate|weights``."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline.planner import CHIPS, MODELS, DoesNotFitError, plan
from pipeline.planner.makespan import CLOCKS
from pipeline.processes.launch import Job, run
from pipeline.weights import command as checkpoints

USAGE_EXIT, UNFIT_EXIT = 2, 1
ABOUT = """Start the processes of a job on this machine, connected by gloo, for development.

Each process finds the others by `pipeline.initialize()`. Lines of process 2 begin with "[2] ".
The first that fails stops all others, and its last lines are shown; so does Ctrl-C.
"""
EPILOG = """examples:
  python -m pipeline launch --processes 4 -- train.py --steps 100
  python -m pipeline launch --processes 2 --devices-per-process 4 -- -m package.train

exit codes: 0 all processes ended well; 2 the command cannot run as given; 130 after Ctrl-C and
143 after SIGTERM; else that of the first process that failed, 128 + n after signal n.
"""
EXAMPLE = "python -m pipeline launch --processes 4 -- train.py --steps 100"

PLAN_ABOUT = """Find how to train a decoder on chips that need not be there, by arithmetic.

Prints the quickest layouts, what limits each and why the others lost; says so where no pipeline is
best. docs/planner.md has what is counted.
"""
PLAN_EPILOG = """examples:
  python -m pipeline plan --model llama-70b --devices 512 --chip v5p --batch 1024 --seq 8192
  python -m pipeline plan --model config.json --devices 64 --chip h100 --batch 256 --seq 4096 \\
      --out plan.toml

exit codes: 0 success; 1 nothing fits, and what would; 2 the command cannot run as given
"""


RUN_ABOUT = """Run a configuration: TOML files, of which the later win, and single keys by --set.

docs/training.md has the keys. Model and data are functions, by import path; run where Python finds
their modules.
"""
RUN_EPILOG = """examples:
  python -m pipeline train --config run.toml --set optimizer.learning_rate=1e-3
  python -m pipeline train --config run.toml --config plan.toml --resume
  python -m pipeline eval --config run.toml
  python -m pipeline generate --config run.toml --prompt "def " --length 200

exit codes: 0 success; 1 too many updates were not finite, or no checkpoint is good; 2 the command
cannot run as given; 130 after Ctrl-C and 143 after SIGTERM, the state saved
"""
RUNS = {"train": "train", "eval": "evaluate a checkpoint", "generate": "continue a prompt"}


class Parser(argparse.ArgumentParser):
    """argparse without the usage text above its errors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say it and end."""
        self.exit(USAGE_EXIT, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, program = given, None
    if "--" in given:
        own, program = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = Parser(prog="python -m pipeline", description="Runs of pipelines.", allow_abbrev=False)
    sub = parser.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")
    launch = sub.add_parser(
        "launch",
        help="start several processes on this machine",
        usage="python -m pipeline launch [options] -- SCRIPT.py|-m MODULE [arguments]",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(launch)
    planner = sub.add_parser(
        "plan",
        help="find mesh, schedule and remat for a model on chips",
        description=PLAN_ABOUT,
        epilog=PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_sizes(planner)
    runs = {name: _add_run(sub, name) for name in RUNS}
    weights = sub.add_parser(
        "weights",
        help="inspect, import and export checkpoints",
        description=checkpoints.ABOUT,
        epilog=checkpoints.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    checkpoints.add_options(weights)
    options, unknown = parser.parse_known_args(own)
    if options.command in RUNS:
        if unknown or program is not None:
            given_wrong = [*unknown, "--"][0]
            runs[options.command].error(f"{given_wrong} is not an option; --help lists them")
        return _flushed(_run(runs[options.command], options))
    if options.command == "weights":
        if unknown or program is not None:
            weights.error(f"{[*unknown, '--'][0]} is not an option; --help lists them")
        return _weights(weights, options)
    if options.command == "plan":
        if unknown or program is not None:
            planner.error(f"{[*unknown, '--'][0]} is not an option; --help lists them")
        return _plan(planner, options)
    if (problem := _problem(program)) is not None:
        launch.error(problem)
    if unknown:
        launch.error(f"{unknown[0]} is not an option; --help lists them, the program's follow --")
    command = [sys.executable, *(program or ())]
    job = Job(command, options.processes, options.devices_per_process, options.port, options.grace)
    return _flushed(run(job))


def _flushed(code: int) -> int:
    """The code, when all is written that somebody reads."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`: nothing more can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _plan(parser: Parser, options: argparse.Namespace) -> int:
    """Print a plan; returns the exit code."""
    wanted = ("model", "devices", "chip", "batch", "seq", "slices", "clock", "efficiency")
    try:
        plans = plan(**{name: getattr(options, name) for name in wanted})
        if options.out is not None:
            plans.write(options.out)
    except DoesNotFitError as error:
        parser.exit(UNFIT_EXIT, f"{parser.prog}: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(plans)
    return _flushed(0)


def _add_run(sub: Any, name: str) -> Parser:
    """The options of a command that runs a configuration."""
    parser: Parser = sub.add_parser(
        name,
        help=f"{RUNS[name]}, by a configuration",
        description=RUN_ABOUT,
        epilog=RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, action="append", required=True, metavar="FILE", help="TOML; repeat")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key, as TOML; repeat")
    if name == "train":
        add("--resume", action="store_true", help="go on from the newest checkpoint")
    if name == "generate":
        add("--prompt", required=True, metavar="TEXT", help="how the text begins")
        add("--length", type=_whole(1), default=100, metavar="N", help="tokens that follow (100)")
        add("--temperature", type=_seconds, default=1.0, metavar="T", help="0: the likeliest (1)")
        add("--seed", type=_whole(0), default=0, metavar="N", help="of the draw (0)")
        add("--context", type=_whole(1), metavar="N", help="positions that the model sees (all)")
        add("--tokenizer", metavar="PATH", help="package.module:function (bytes)")
    return parser


def _run(parser: Parser, options: argparse.Namespace) -> int:
    """Train, evaluate or generate; returns the exit code."""
    # Whoever starts processes or asks for a plan does not load what trains.
    from pipeline.training import run as runs  # noqa: PLC0415
    from pipeline.training.checkpoints import CheckpointError  # noqa: PLC0415
    from pipeline.training.config import Config  # noqa: PLC0415

    try:
        config = Config.from_files(options.config, options.set)
        if options.command == "train":
            given = [f"--config {shlex.quote(str(path))}" for path in options.config]
            given += [f"--set {shlex.quote(text)}" for text in options.set]
            how = f"python -m pipeline train {' '.join(given)} --resume"
            return runs.train(config, resume=options.resume, how=how)
        if options.command == "eval":
            print(f"held-out loss {runs.evaluate(config):.4f}")
            return 0
        names = ("length", "temperature", "seed", "context", "tokenizer")
        given_options = {name: getattr(options, name) for name in names}
        print(runs.continued(config, runs.Prompt(text=options.prompt, **given_options)))
    except CheckpointError as error:
        parser.exit(UNFIT_EXIT, f"{parser.prog}: {error}\n")
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    return 0


def _weights(parser: Parser, options: argparse.Namespace) -> int:
    """Run a command for checkpoints; returns the exit code."""
    try:
        print(checkpoints.run(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return _flushed(0)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = f"{', '.join(MODELS)}, or the path of a Hugging Face config.json"
    add("--model", required=True, help=models)
    add("--devices", type=_whole(1), required=True, metavar="N", help="how many chips")
    add("--chip", required=True, help=", ".join(CHIPS))
    add("--batch", type=_whole(1), required=True, metavar="N", help="sequences of a step")
    add("--seq", type=_whole(1), required=True, metavar="T", help="positions of a sequence")
    add(
        "--slices",
        type=_whole(1),
        metavar="G",
        help="groups that only the network joins (as few as the chip allows; of GPUs, hosts)",
    )
    add("--clock", choices=CLOCKS, default="lockstep", help="of pipelines (lockstep)")
    add("--efficiency", type=float, metavar="E", help="of products, of peak (the chip's)")
    add("--out", type=Path, metavar="FILE", help="write the best as TOML for ParallelConfig")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--processes", type=_whole(1), required=True, metavar="N", help="how many to start")
    add(
        "--devices-per-process",
        type=_whole(1),
        default=1,
        metavar="D",
        help="virtual CPU devices of each (1)",
    )
    add("--port", type=_whole(0), default=0, metavar="P", help="of process 0, 0 for a free one (0)")
    add(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds from asking a process to end until it is killed (5)",
    )


def _problem(program: Sequence[str] | None) -> str | None:
    """What is wrong with the program to start."""
    if program is None:
        return f"what to start comes after --, and there is no --; for example {EXAMPLE}"
    if not program:
        return f"there is nothing after --; give a script or -m MODULE, for example {EXAMPLE}"
    first = program[0]
    if first == "-m":
        return None if len(program) > 1 else "-m names no module; give -- -m MODULE [arguments]"
    if first.startswith("-"):
        return f"{first} comes before the script; give -- SCRIPT.py or -- -m MODULE, then arguments"
    if not Path(first).is_file():
        return f"{first} is no file; give the path of a Python script, or -m MODULE"
    return None


def _whole(least: int) -> type[int]:
    def convert(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return value

    return convert  # type: ignore[return-value]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return value
