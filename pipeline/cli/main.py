"""The command line: ``python -m pipeline launch|plan|train|eval|generate|weights|env``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pipeline.cli.options import COMMANDS, Parser, flushed
from schedules.tools.text import open_streams

_BY_CONFIGURATION = {"train", "eval", "generate"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    open_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, program = given, None
    if "--" in given:
        own, program = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = Parser(prog="python -m pipeline", description="Runs of pipelines.", allow_abbrev=False)
    sub = parser.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")
    module: Any = None
    command = parser
    for name, said in COMMANDS.items():
        if own[:1] == [name]:  # modules of the others are not imported
            room = "configured" if name in _BY_CONFIGURATION else name
            module = importlib.import_module(f"pipeline.cli.{room}")
            command = module.add(sub, name)
        else:
            sub.add_parser(name, help=said)
    options, unknown = parser.parse_known_args(own)
    if options.command == "launch":
        return flushed(module.run(command, options, program, unknown))
    if unknown or program is not None:
        command.error(f"{[*unknown, '--'][0]} is not an option; --help lists them")
    try:
        return flushed(module.run(command, options))
    except (ValueError, OSError, ImportError) as error:
        command.error(str(error))
