"""``python -m pipeline weights``: the contents of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.cli.options import Parser, add_command, say
from pipeline.models.weights.load import inspect

ABOUT = """Look at a checkpoint of the Hugging Face layout. Only headers of files are read.

The page Weights in and out of the documentation says how to load and save one.
"""
EPILOG = """examples:
  python -m pipeline weights inspect Llama-3.2-1B --stages 4
  python -m pipeline weights inspect Llama-3.2-1B --layout 'Ettt|(t*5|)*2tttL' --names

exit codes: 0 success; 2 the command cannot run as given, or the checkpoint is not whole
"""


def add(sub: Any, name: str) -> Parser:
    parser = add_command(sub, name, about=ABOUT, epilog=EPILOG)
    add = parser.add_argument
    add("action", type=_read_action, metavar="inspect", help="what to do with the folder")
    add("folder", type=Path, help="config.json and safetensors")
    add("--stages", type=int, metavar="K", help="layers are shared by so many")
    add("--layout", metavar="TEXT", help="which layers each stage has, such as 'Ett|(t*4|)*2ttL'")
    add("--names", action="store_true", help="list every tensor")
    return parser


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Run the command, and print its text; returns the exit code."""
    cut: dict[str, Any] = {"num_stages": options.stages, "layout": options.layout}
    if None not in cut.values():
        parser.error("--stages and --layout: the layout says how many there are; give one")
    say(inspect(options.folder, **cut, names=options.names))
    return 0


def _read_action(text: str) -> str:
    if text in ("import", "export"):
        raise argparse.ArgumentTypeError(
            f"{text} was removed, with folders of stages: weights.load reads the slices of each "
            f"device from the Hugging Face layout, and weights.save writes it; for a state of "
            f"training take pipeline.training.checkpoints.Checkpoints, which uses Orbax"
        )
    if text != "inspect":
        raise argparse.ArgumentTypeError(f"{text!r} is no action; give inspect")
    return text
