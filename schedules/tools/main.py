"""The command line: ``python -m schedules draw|table|check|compare|auto|convert``.

Exit codes: 0 success; 1 a timetable is illegal, or nothing meets the limits; 2 the command's
arguments are wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeAlias

from schedules.build import names
from schedules.core.action import ScheduleError, printable
from schedules.core.files import shown
from schedules.search.auto import BUDGET
from schedules.tools import commands, options
from schedules.tools.text import complain, in_options, open_streams

USAGE_EXIT, INTERRUPTED = 2, 130

ABOUT = f"""Pipeline-parallel timetables: build, check, time, compare and draw them.

A SCHEDULE is a family, built for -S ranks, -M microbatches and -K stages:
  {", ".join(names())}
or a file, .csv (as torch.distributed.pipelining writes it) or .json:
  0F0,0F1,,0B0,,0B1     one row per rank; 0F1 is stage 0, forward, microbatch 1
  ,1F0,1B0,1F1,1B1,     F forward, B backward = I input gradient + W weight gradient

Two clocks. event: a rank waits only for its data. lockstep: what a compiled step
does, where ranks meet at the end of every slot of a tick that sends.
"""

EXAMPLES = """examples:
  python -m schedules draw 1f1b -S 4 -M 8
  python -m schedules draw 1f1b zb_h1 -S 4 -M 8 -o page.html
  python -m schedules table zb_h1 -S 4 -M 8 --i 1.2 --w 0.8 --clock lockstep
  python -m schedules compare -S 4 -M 16 --clock lockstep --max-activations 8
  python -m schedules auto -S 4 -M 16 --f 1,1,1,2 -o best.csv
  python -m schedules auto -S 4 -M 16 --clock lockstep --costs calibration.json
  python -m schedules check best.csv && python -m schedules convert best.csv best.json

exit codes: 0 success; 1 illegal timetable, or no timetable within the limits;
2 the command cannot run as given (the reason is on standard error)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    open_streams()
    try:
        chosen = _parser().parse_args(arguments)
        code: int = chosen.run(chosen)
    except BrokenPipeError:  # `... | head`: the reader has stopped
        return 0
    except (options.UsageError, ScheduleError, ImportError, OSError) as error:
        complain(_told(error))
        return USAGE_EXIT
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{shown(error.filename)}: {error.strerror}; give a path that can be read and written"
        )
    if isinstance(error, ImportError):
        return f"{error}; a picture needs matplotlib: install it, or draw an .html page"
    text = in_options(str(error)) if isinstance(error, ScheduleError) else str(error)
    return "\n".join(map(printable, text.split("\n")))


def _parser() -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="python -m schedules",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _draw(sub)
    _table(sub)
    _check(sub)
    _compare(sub)
    _auto(sub)
    _convert(sub)
    return parser


# argparse has no public name for the object to which commands are added.
_Commands: TypeAlias = "argparse._SubParsersAction[options.Parser]"  # noqa: SLF001


def _command(sub: _Commands, name: str, about: str, more: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = sub.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}. {more}".strip(),
    )
    return parser


def _draw(sub: _Commands) -> None:
    parser = _command(
        sub,
        "draw",
        "draw timetables, on the terminal or into files",
        "An .html page is interactive: zoom, hover, both clocks, two timetables side by side.",
    )
    parser.add_argument("schedules", nargs="+", metavar="SCHEDULE")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=".html, .png, .svg, .txt, or .json for Perfetto; may be repeated",
    )
    parser.add_argument("--title", help="a line above the drawing")
    options.add_timing(parser)
    parser.set_defaults(run=commands.draw)


def _table(sub: _Commands) -> None:
    parser = _command(
        sub,
        "table",
        "the numbers of one timetable, rank by rank",
        "Idle time is split by cause and sums to the makespan less the work.",
    )
    parser.add_argument("schedule", metavar="SCHEDULE")
    options.add_timing(parser)
    options.add_json(parser)
    parser.set_defaults(run=commands.table)


def _check(sub: _Commands) -> None:
    parser = _command(
        sub,
        "check",
        "say whether timetables are legal, or show every fault",
        "Exit code 1 if one is not.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    options.add_limit(parser)
    options.add_json(parser)
    parser.set_defaults(run=commands.check_files)


def _compare(sub: _Commands) -> None:
    parser = _command(
        sub,
        "compare",
        "timetables side by side, the quickest first",
        "All families by default. With several -K, durations are those of K = S and a stage of "
        "K = V S takes a V-th of them.",
    )
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE")
    group = parser.add_argument_group("sizes")
    for short, name, about in options.SIZES:
        group.add_argument(short, name, type=options.count, metavar=short[1], help=about)
    group.add_argument(
        "-K",
        "--stages",
        dest="stages_list",
        type=options.count,
        nargs="+",
        metavar="K",
        help="slices of the model, one or several numbers (S)",
    )
    options.add_clock(parser)
    options.add_limit(parser)
    options.add_merge(parser)
    options.add_json(parser)
    parser.set_defaults(run=commands.compare, stages=None)


def _auto(sub: _Commands) -> None:
    parser = _command(
        sub,
        "auto",
        "find the best timetable for costs, memory and clock",
        "All families, the heuristic of the zero-bubble paper, list schedules and local "
        "improvement; the table says why each of the others lost. Exit code 1 if nothing fits.",
    )
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write the winner: .csv or .json timetable, or a drawing; may be repeated",
    )
    parser.add_argument("--budget", type=int, help=f"timetables tried ({BUDGET}; fewer if large)")
    parser.add_argument("--seed", type=int, default=0, help="of local improvement (0)")
    options.add_sizes(parser, required=True)
    options.add_clock(parser)
    options.add_limit(parser)
    options.add_json(parser)
    parser.set_defaults(run=commands.choose, title=None)


def _convert(sub: _Commands) -> None:
    parser = _command(sub, "convert", "write a timetable into a .csv or a .json file")
    parser.add_argument("schedule", metavar="SCHEDULE")
    parser.add_argument("target", metavar="FILE")
    options.add_sizes(parser)
    options.add_costs(parser)
    options.add_merge(parser)
    options.add_json(parser)
    parser.set_defaults(run=commands.convert)
