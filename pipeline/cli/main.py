"""The command line: ``python -m pipeline launch|plan|train|eval|generate|weights``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeline.cli import configured, launch, plan, weights
from pipeline.cli.options import Parser, flushed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, program = given, None
    if "--" in given:
        own, program = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = Parser(prog="python -m pipeline", description="Runs of pipelines.", allow_abbrev=False)
    sub = parser.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")
    launching = launch.add(sub)
    others = {
        "plan": (plan.add(sub), plan.run),
        **{name: (configured.add(sub, name), configured.run) for name in configured.COMMANDS},
        "weights": (weights.add(sub), weights.run),
    }
    options, unknown = parser.parse_known_args(own)
    if options.command == "launch":
        return flushed(launch.run(launching, options, program, unknown))
    command, run = others[options.command]
    if unknown or program is not None:
        command.error(f"{[*unknown, '--'][0]} is not an option; --help lists them")
    return flushed(run(command, options))
