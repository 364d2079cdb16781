"""``python -m pipeline launch``: several processes on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.options import Parser, add_command, number, whole
from pipeline.processes.launch import Job
from pipeline.processes.launch import run as run_job

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


def add(sub: Any, name: str) -> Parser:
    usage = "python -m pipeline launch [options] -- SCRIPT.py|-m MODULE [arguments]"
    parser = add_command(sub, name, usage=usage, about=ABOUT, epilog=EPILOG)
    add = parser.add_argument
    add("--processes", type=whole(1), required=True, metavar="N", help="how many to start")
    about = "virtual CPU devices of each (1)"
    add("--devices-per-process", type=whole(1), default=1, metavar="D", help=about)
    add("--port", type=whole(0), default=0, metavar="P", help="of process 0, 0 for a free one (0)")
    about = "seconds from asking a process to end until it is killed (5)"
    add("--grace", type=number, default=5.0, metavar="S", help=about)
    return parser


def run(
    parser: Parser,
    options: argparse.Namespace,
    program: Sequence[str] | None,
    unknown: Sequence[str],
) -> int:
    """Run a job, with the arguments after ``--`` if that is given; returns its exit code."""
    if program is None:
        parser.error(f"what to start comes after --, and there is no --; for example {EXAMPLE}")
    if not program:
        parser.error(
            f"there is nothing after --; give a script or -m MODULE, for example {EXAMPLE}"
        )
    first = program[0]
    if program == ["-m"]:
        parser.error("-m names no module; give -- -m MODULE [arguments]")
    if first.startswith("-") and first != "-m":
        then = "give -- SCRIPT.py or -- -m MODULE, then arguments"
        parser.error(f"{first} comes before the script; {then}")
    if first != "-m" and not Path(first).is_file():
        parser.error(f"{first} is no file; give the path of a Python script, or -m MODULE")
    if unknown:
        parser.error(f"{unknown[0]} is not an option; --help lists them, the program's follow --")
    sizes = options.processes, options.devices_per_process, options.port, options.grace
    return run_job(Job([sys.executable, *program], *sizes))
