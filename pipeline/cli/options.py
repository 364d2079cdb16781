"""Conventions of the commands: how they are added, how options look, how they end."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from schedules.tools.text import say as text_say

USAGE_EXIT, UNFIT_EXIT = 2, 1

# A line of each command, for the list of all, which imports none of them.
COMMANDS = {
    "launch": "start several processes on this machine",
    "plan": "find mesh, schedule and remat for a model on chips",
    "train": "train, by a configuration",
    "eval": "evaluate a checkpoint, by a configuration",
    "generate": "continue a prompt, by a configuration",
    "weights": "inspect checkpoints",
    "env": "print versions, devices and settings, for a bug report",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line without the usage text, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_EXIT, f"{self.prog}: {message}\n")


def add_command(
    sub: Any, name: str, *, about: str, epilog: str, usage: str | None = None
) -> Parser:
    """Add a command; return its parser, with texts above and below its options."""
    texts = {"help": COMMANDS[name], "usage": usage, "description": about, "epilog": epilog}
    layout = argparse.RawDescriptionHelpFormatter
    parser: Parser = sub.add_parser(name, **texts, formatter_class=layout, allow_abbrev=False)
    return parser


def whole(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers that are at least ``least``."""

    def convert(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return value

    return convert


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def say(text: str, *, end: str = "\n") -> None:
    """Print, unless the reader has closed standard output."""
    try:
        text_say(text, end=end)
    except BrokenPipeError:  # `... | head`: nothing more can be said
        pass
    except OSError as error:
        why = f"standard output: {error.strerror}; give one that can be written"
        Parser(prog="python -m pipeline").error(why)


def flushed(code: int) -> int:
    say("", end="")
    return code
