"""``python -m pipeline plan``: mesh, schedule and remat for a model on chips."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.cli.options import UNFIT_EXIT, Parser, add_command, say, whole
from pipeline.planner import CHIPS, MODELS, DoesNotFitError, plan
from pipeline.planner.clock import CLOCKS
from pipeline.planner.layout import DISPATCHES
from schedules.core.files import check_output

ABOUT = """Find how to train a decoder on chips that need not be there, by arithmetic.

Prints the quickest layouts, what limits each and why the others lost; says so where no pipeline is
best. The page on the planner, in the documentation, says what is counted.
"""
EPILOG = """examples:
  python -m pipeline plan --model llama-70b --devices 512 --chip v5p --batch 1024 --seq 8192
  python -m pipeline plan --model config.json --devices 64 --chip h100 --batch 256 --seq 4096 \\
      --out plan.toml

exit codes: 0 success; 1 nothing fits, and what would; 2 the command cannot run as given
"""


def add(sub: Any, name: str) -> Parser:
    parser = add_command(sub, name, about=ABOUT, epilog=EPILOG)
    add = parser.add_argument
    models = f"{', '.join(MODELS)}, or the path of a Hugging Face config.json"
    add("--model", required=True, help=models)
    add("--devices", type=whole(1), required=True, metavar="N", help="how many chips")
    add("--chip", required=True, help=", ".join(CHIPS))
    add("--batch", type=whole(1), required=True, metavar="N", help="sequences of a step")
    add("--seq", type=whole(1), required=True, metavar="T", help="positions of a sequence")
    about = "groups that only the network joins (as few as the chip allows; of GPUs, hosts)"
    add("--slices", type=whole(1), metavar="G", help=about)
    add("--clock", choices=CLOCKS, default="lockstep", help="of pipelines (lockstep)")
    add("--efficiency", type=float, metavar="E", help="of products, of peak (the chip's)")
    about = "ways of taking tokens to experts that are tried (all)"
    add("--dispatch", nargs="+", choices=DISPATCHES, default=DISPATCHES, help=about)
    about = "load of the busiest expert over the mean (1.25)"
    add("--imbalance", type=float, default=1.25, metavar="X", help=about)
    about = "auto: stashes in host memory are tried where memory is short (not tried)"
    add("--offload", choices=["auto"], help=about)
    add(
        "--context",
        nargs="+",
        metavar="R",
        help="sizes of the axis context that are tried, or auto for all that divide (1)",
    )
    add("--out", type=Path, metavar="FILE", help="write the best as TOML for ParallelConfig")
    return parser


def sizes(words: list[str] | None) -> Any:
    """Convert words to sizes as `plan` takes them: numbers, "auto" or None; `plan` checks them."""
    if words is None or words == ["auto"]:
        return words and "auto"
    return [int(word) if word.isdigit() else word for word in words]


def run(parser: Parser, options: argparse.Namespace) -> int:
    wanted = ["model", "devices", "chip", "batch", "seq", "slices", "clock", "efficiency"]
    wanted += ["dispatch", "imbalance", "offload"]
    given = {name: getattr(options, name) for name in wanted}
    if options.out is not None:
        check_output("--out", options.out, [options.model])
    try:
        plans = plan(**given, context=sizes(options.context))
    except DoesNotFitError as error:
        parser.exit(UNFIT_EXIT, f"{parser.prog}: {error}\n")
    if options.out is not None:
        plans.write(options.out)
    say(str(plans))
    return 0
