"""``python -m pipeline train``, ``eval`` and ``generate``: runs of a configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from pipeline.cli.options import UNFIT_EXIT, Parser, add_command, number, say, whole
from pipeline.processes.names import PROCESSES

ABOUT = """Run a configuration: TOML files, of which the later win, and single keys by --set.

The page Training of the documentation lists the keys. Model and data are functions, by import path:
run the command where Python finds their modules.
"""
EPILOG = """examples:
  python -m pipeline train --config run.toml --set optimizer.learning_rate=1e-3
  python -m pipeline train --config run.toml --config plan.toml --resume
  python -m pipeline eval --config run.toml
  python -m pipeline generate --config run.toml --prompt "def " --length 200

exit codes: 0 success; 1 too many updates were not finite, or no checkpoint is good; 2 the command
cannot run as given; 129 after SIGHUP, 130 after Ctrl-C and 143 after SIGTERM, the state saved
"""


def add(sub: Any, name: str) -> Parser:
    parser = add_command(sub, name, about=ABOUT, epilog=EPILOG)
    add = parser.add_argument
    add("--config", type=Path, action="append", required=True, metavar="FILE", help="TOML; repeat")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key, as TOML; repeat")
    if name == "train":
        add("--resume", action="store_true", help="go on from the newest checkpoint")
        add("--measure", action="store_true", help="at the end, print where a step's time goes")
    if name == "generate":
        add("--prompt", required=True, metavar="TEXT", help="how the text begins")
        add("--length", type=whole(1), default=100, metavar="N", help="tokens that follow (100)")
        add("--temperature", type=number, default=1.0, metavar="T", help="0: the likeliest (1)")
        add("--seed", type=whole(0), default=0, metavar="N", help="of the draw (0)")
        add("--context", type=whole(1), metavar="N", help="positions that the model sees (all)")
        add("--tokenizer", metavar="PATH", help="package.module:function (bytes)")
    return parser


def run(parser: Parser, options: argparse.Namespace) -> int:
    # The commands `launch` and `plan` load nothing that trains.
    from pipeline.cli import run as runs
    from pipeline.processes.cluster import find
    from pipeline.training.checkpoints import CheckpointError
    from pipeline.training.config import Config

    try:
        if (count := find(None, None, None, timeout=10).count) > 1:
            parser.error(
                f"this is one of {count} processes of a job, and {options.command} runs in one: "
                f"start a script of your own that calls pipeline.initialize() (the page Several "
                f"processes), or give this one {PROCESSES}=1"
            )
        config = Config.from_files(options.config, options.set)
        if options.command == "train":
            given = [f"--config {shlex.quote(str(path))}" for path in options.config]
            given += [f"--set {shlex.quote(text)}" for text in options.set]
            python = shlex.quote(sys.executable or "python")
            how = f"{python} -m pipeline train {' '.join(given)} --resume"
            return runs.train(config, resume=options.resume, how=how, measure=options.measure)
        if options.command == "eval":
            say(f"held-out loss {runs.evaluate(config):.4f}")
            return 0
        names = ("length", "temperature", "seed", "context", "tokenizer")
        draw = {name: getattr(options, name) for name in names}
        say(runs.continued(config, options.prompt, **draw))
    except CheckpointError as error:
        parser.exit(UNFIT_EXIT, f"{parser.prog}: {error}\n")
    return 0
