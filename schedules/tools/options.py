"""Options that the commands share: a timetable, its sizes, its costs, its clock."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from schedules.build import build, names, split_names
from schedules.build import options as options_of
from schedules.clocks.report import Report
from schedules.clocks.simulate import CLOCKS, simulate
from schedules.clocks.ticks import PATTERNS
from schedules.core.costs import Costs
from schedules.core.records import costs_of, read_record
from schedules.core.schedule import Schedule
from schedules.families import GROUPED, SLICED
from schedules.tools.records import read_json
from schedules.tools.text import complain

FILES = (".csv", ".json")
SIZES = (
    ("-S", "--ranks", "devices on the stage axis"),
    ("-M", "--microbatches", "slices of the batch"),
)


_COSTS = ("f", "i", "w", "b", "comm", "optimizer", "pair")


# Families with several stages per rank, and the names of their case with one stage.
_OF_ONE_STAGE = {
    "looped_bfs": "gpipe",
    "interleaved_1f1b": "1f1b with the warm-up of eager_1f1b",
    "interleaved_zb": "zb_h1",
}


class UsageError(Exception):
    """A command line with missing or invalid arguments."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def add_sizes(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    group = parser.add_argument_group(
        "sizes", None if required else "of a family; a file has its own"
    )
    for short, name, about in SIZES:
        group.add_argument(short, name, type=count, metavar=short[1], help=about, required=required)
    group.add_argument("-K", "--stages", type=count, metavar="K", help="slices of the model (S)")
    if not required:
        about = f"slices of sequences, for {' and '.join(SLICED)}"
        group.add_argument("-N", "--slices", type=count, metavar="N", help=about)
        about = f"microbatches of a round, for {' and '.join(GROUPED)}: S/2 to S"
        group.add_argument("--group", type=count, metavar="G", help=about)


def add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs", "in any one unit of time")
    each = "one number, or K of them with commas between"
    group.add_argument(
        "--costs",
        metavar="FILE",
        help="all of them, as pipe.calibrate(...).to_json(FILE) has measured them, in seconds",
    )
    group.add_argument("--f", type=durations, help=f"forward of a stage: {each} (1)")
    group.add_argument("--i", type=durations, help="input gradient, likewise (1)")
    group.add_argument("--w", type=durations, help="weight gradient, likewise (1)")
    group.add_argument("--b", type=durations, help="whole backward, likewise (I + W)")
    group.add_argument("--comm", type=float, help="message between ranks (0)")
    group.add_argument("--optimizer", type=float, help="synchronous update (0)")
    group.add_argument("--pair", type=float, help="an overlapped F & B pair (their sum)")


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a family that splits backwards: a W that fills no idle time stays in its B",
    )


def add_clock(parser: argparse.ArgumentParser) -> None:
    add_costs(parser)
    group = parser.add_argument_group("clock")
    group.add_argument(
        "--clock",
        choices=[clock for clock in CLOCKS if clock != "measured"],
        default="event",
        help="event: a rank waits only for its data. lockstep: as compiled, ranks meet at the end "
        "of every slot of a tick that sends (event)",
    )
    group.add_argument("--pattern", choices=PATTERNS, help="slots of a lockstep tick (the fastest)")
    group.add_argument(
        "--partners", action="store_true", help="a lockstep exchange joins only who takes part"
    )
    group.add_argument(
        "--delayed",
        action="store_true",
        help="a lockstep exchange runs beside the work of the next slot",
    )


def add_limit(parser: argparse.ArgumentParser, whose: str = "") -> None:
    parser.add_argument(
        "--max-activations",
        type=limit,
        metavar="N",
        help=f"stage inputs that a rank may hold at once{whose}",
    )
    parser.add_argument(
        "--memory-limit",
        type=limit,
        action=_Renamed,
        dest="max_activations",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class _Renamed(argparse.Action):
    """An option under its old name; its use prints the new name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *values: Any
    ) -> None:
        new = f"--{self.dest.replace('_', '-')}"
        sys.stderr.write(f"{parser.prog}: {self.option_strings[0]} is now {new}\n")
        setattr(namespace, self.dest, values[0])


def add_timing(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    add_limit(parser, ", for zb_auto and auto")
    add_merge(parser)
    add_clock(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def limit(text: str) -> float:
    if math.isnan(number := float(text)):
        raise argparse.ArgumentTypeError("must be a number, not nan")
    return number


def durations(text: str) -> float | tuple[float, ...]:
    parts = [float(part) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else tuple(parts)


def costs(options: argparse.Namespace) -> Costs:
    """Return the costs in the options, or in the file that they name."""
    stated = {name: value for name in _COSTS if (value := getattr(options, name)) is not None}
    if options.costs is None:
        return Costs(**stated)
    if stated:
        raise UsageError(f"--costs {options.costs} says them all; leave out --{next(iter(stated))}")
    return read_record(options.costs, costs_of)


def scaled(whole: Costs, share: float) -> Costs:
    """Scale uniform costs to stages of another size: durations times ``share``."""
    if math.isclose(share, 1.0):
        return whole
    lengths = {name: getattr(whole, name) for name in ("f", "i", "w", "b", "pair")}
    lengths = {name: value for name, value in lengths.items() if value is not None}
    if not all(isinstance(value, int | float) for value in lengths.values()):
        raise UsageError(
            "--f, --i, --w and --b, or the file of --costs, give a duration per stage, which fits "
            "one K only; give one number each to compare several"
        )
    return replace(whole, **{name: value * share for name, value in lengths.items()})


def is_file(name: str) -> bool:
    return Path(name).suffix.lower() in FILES


def read(path: str) -> Schedule:
    return read_json(path) if Path(path).suffix.lower() == ".json" else Schedule.from_csv(path)


def check_source(name: str) -> None:
    """Check the name or file of a timetable before anything is timed."""
    if is_file(name):
        if not Path(name).is_file():
            raise UsageError(f"{name}: give the path of a .csv or .json file that is there")
        return
    families = (*names(), "auto", *SLICED)
    if name not in families and Path(name).exists():
        raise UsageError(f"{name}: a timetable is a file with one of the suffixes {FILES}")
    if name not in families:
        build(name, num_ranks=1, num_microbatches=1)  # its error lists the families


def load(
    options: argparse.Namespace,
    name: str,
    num_stages: int | None = None,
    given: Costs | None = None,
) -> Schedule:
    """Load a timetable from a file, or build a family of the given sizes and costs."""
    if is_file(name):
        return read(name)
    check_source(name)
    if options.ranks is None or options.microbatches is None:
        raise UsageError(f"{name} is a family: give its sizes, for example -S 4 -M 8")
    schedule = build(
        name,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        num_stages=options.stages if num_stages is None else num_stages,
        **_wanted(options, name, given),
    )
    if name in _OF_ONE_STAGE and schedule.num_stages == options.ranks:
        complain(
            f"{name} with K = S = {options.ranks} is {_OF_ONE_STAGE[name]}: a rank holds one "
            f"stage; give -K {2 * options.ranks} or another multiple of S"
        )
    return schedule


def _wanted(options: argparse.Namespace, name: str, given: Costs | None) -> dict[str, Any]:
    """Return the options for a family made for given costs that the user has given."""
    # If all families are compared, families without halves are built without merging.
    merge = getattr(options, "merge", False)
    merge = merge and (name in split_names() or bool(getattr(options, "schedules", [name])))
    # If families are compared, those without slices or rounds are built without these options.
    listed = {*(getattr(options, "schedules", None) or ())}
    taken = [*options_of(name), "merge", *["costs"] * merge]
    for option, families in (("num_slices", SLICED), ("group", GROUPED)):
        taken += [option] * (name in families or not listed & {*families})
    wishes: dict[str, Callable[[], Any]] = {
        "merge": lambda: merge,
        "costs": lambda: given or costs(options),
        "max_activations": lambda: getattr(options, "max_activations", None),
        "clock": lambda: getattr(options, "clock", None),
        "num_slices": lambda: getattr(options, "slices", None),
        "group": lambda: getattr(options, "group", None),
    }
    return {option: wish() for option, wish in wishes.items() if option in taken}


def clocked(options: argparse.Namespace, schedule: Schedule, given: Costs | None = None) -> Report:
    return simulate(
        schedule,
        costs(options) if given is None else given,
        options.clock,
        pattern=options.pattern,
        partners=options.partners,
        delayed=options.delayed,
    )
