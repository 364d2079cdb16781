"""``python -m pipeline weights``: inspect, import and export of checkpoints."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.options import Parser, add_command, say
from pipeline.models.weights.inspect import inspect
from pipeline.models.weights.native import export_stages, import_stages

ABOUT = """Look at checkpoints of the Hugging Face layout, and cut them into stages and back.

No device is used, and no more than one weight is in memory. The page Weights in and out of the
documentation has the rest.
"""
EPILOG = """examples:
  python -m pipeline weights inspect Llama-3.2-1B --stages 4
  python -m pipeline weights import Llama-3.2-1B --out stages --layout 'Ettt|(t*5|)*2tttL'
  python -m pipeline weights export stages --out again --shard-gb 2

exit codes: 0 success; 2 the command cannot run as given, or the checkpoint is not whole
"""


def add(sub: Any, name: str) -> Parser:
    """Add the command and its arguments."""
    parser = add_command(sub, name, about=ABOUT, epilog=EPILOG)
    add = parser.add_argument
    add("action", choices=("inspect", "import", "export"), help="what to do with the folder")
    add("folder", type=Path, help="config.json and safetensors; of export, what import wrote")
    add("--out", type=Path, metavar="FOLDER", help="to write, not there yet (import and export)")
    add("--stages", type=int, metavar="K", help="layers are shared by so many (1)")
    add("--layout", metavar="TEXT", help="which layers each stage has, such as 'Ett|(t*4|)*2ttL'")
    add("--dtype", metavar="NAME", help="of what is written, such as bfloat16 (as it is)")
    add("--shard-gb", type=float, metavar="GB", help="of weights in a file of an export (5)")
    add("--names", action="store_true", help="list every tensor (inspect)")
    return parser


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Run the command, and print its text; returns the exit code."""
    try:
        say(_done(options))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _done(options: argparse.Namespace) -> str:
    """Run the command; returns the text to print."""
    action, out = options.action, options.out
    allowed: dict[str, Sequence[str]] = {
        "inspect": ("stages", "layout", "names"),
        "import": ("out", "stages", "layout", "dtype"),
        "export": ("out", "dtype", "shard_gb"),
    }
    for name in ("out", "stages", "layout", "dtype", "shard_gb", "names"):
        if name not in allowed[action] and getattr(options, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} says nothing to {action}")
    if options.stages is not None and options.layout is not None:
        raise ValueError("--stages and --layout: the layout says how many there are; give one")
    cut: dict[str, Any] = {"num_stages": options.stages, "layout": options.layout}
    if action == "inspect":
        return inspect(options.folder, **cut, names=options.names)
    if out is None:
        raise ValueError(f"{action} writes a folder: give --out")
    if action == "import":
        counts = import_stages(options.folder, out, **cut, dtype=options.dtype)
        return f"{out}: {len(counts)} stages of {', '.join(map(str, counts))} layers"
    gb = 5.0 if options.shard_gb is None else options.shard_gb
    if not 0 < gb < math.inf:
        raise ValueError(f"--shard-gb {gb:g}: must be a finite number > 0")
    export_stages(options.folder, out, dtype=options.dtype, shard_bytes=max(1, int(gb * 1e9)))
    return f"{out}: written"
