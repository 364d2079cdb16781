"""Hostile arguments: each is a ScheduleError in a few words, and no more."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import stat
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import schedules
from schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    auto,
    build,
    check,
    from_orders,
    lower,
    simulate,
)
from schedules.core.files import replace, shown
from schedules.tools.draw import save_timeline
from schedules.tools.main import main
from schedules.tools.page import save_page
from schedules.tools.records import read_json, report_record
from schedules.tools.terminal import render
from schedules.tools.trace import save_trace

S = build("1f1b", num_ranks=2, num_microbatches=2)
ONE = ((Action(0, "F", 0),),)
HUGE = 10**5000  # which int cannot print
MEASURED = {action: 1.0 for order in S.orders for action in order}


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ScheduleError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert len(message) < 8000
    return message


STRANGE = [
    None,
    True,
    -1,
    0.5,
    10**400,
    HUGE,
    float("nan"),
    "x",
    b"x",
    Fraction(1, 2),
    Decimal("NaN"),
    np.array(4),
    np.array([1.0, 2.0]),
    np.array(["a"]),
    [],
    [[1], [2, 3]],
    {},
    {4},
    object(),
    int,
]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
def test_strange_arguments(value, tmp_path):
    """A ScheduleError, or they are fine: nothing else comes out of the inside."""
    calls = [
        lambda: build(value, num_ranks=2, num_microbatches=2),
        lambda: build("1f1b", num_ranks=value, num_microbatches=2),
        lambda: build("1f1b", num_ranks=2, num_microbatches=value),
        lambda: build("1f1b", num_ranks=2, num_microbatches=2, num_stages=value),
        lambda: build("zb_auto", num_ranks=2, num_microbatches=2, weight_memory=value),
        lambda: build("zb_auto", num_ranks=2, num_microbatches=2, max_activations=value),
        lambda: build("zb_auto", num_ranks=2, num_microbatches=2, costs=value),
        lambda: auto(2, 2, costs=value, budget=0),
        lambda: auto(2, 2, clock=value, budget=0),
        lambda: auto(2, 2, max_activations=value, budget=0),
        lambda: check(value),
        lambda: check(S, max_activations=value),
        lambda: simulate(value),
        lambda: simulate(S, value),
        lambda: simulate(S, clock=value),
        lambda: simulate(S, clock="lockstep", pattern=value),
        lambda: simulate(S, clock="lockstep", partners=value),
        lambda: simulate(S, clock="lockstep", delayed=value),
        lambda: simulate(S, clock="measured", durations=value),
        lambda: simulate(S, clock="measured", durations=dict.fromkeys(MEASURED, value)),
        lambda: lower(S, keep=value),
        lambda: lower(S, pattern=value),
        lambda: lower(S, costs=value),
        lambda: lower(S, partners=value),
        lambda: lower(S, delayed=value),
        lambda: from_orders(value),
        lambda: from_orders([value]),
        lambda: from_orders([["0F0"]], placement=value),
        lambda: Action.parse(value),
        lambda: render(value),
        lambda: render(S, width=value),
        lambda: render(S, unit=value),
        lambda: save_trace(value, tmp_path / "x.json"),
        lambda: save_trace(simulate(S), tmp_path / "x.json", value),
        lambda: save_timeline(value, tmp_path / "x.svg"),
        lambda: save_page(value, tmp_path / "x.html"),
        *(lambda name=name: Costs(**{name: value}) for name in ("f", "i", "w", "comm", "pair")),
        *(
            lambda part=part: check(dataclasses.replace(S, **{part: value}))
            for part in ("name", "num_microbatches", "orders", "placement", "pairs")
        ),
        lambda: check(Schedule("x", 1, (value,), (0,))),
        lambda: check(Schedule("x", 1, ((value,),), (0,))),
        lambda: check(Schedule("x", 1, ONE, (value,))),
        lambda: check(Schedule("x", 1, ONE, (0,), (value,))),
        lambda: check(Schedule("x", 1, ONE, (0,), ((value,),))),
        *(
            lambda at=at: check(
                from_orders([[Action(*(0, "F", 0)[:at], value, *(0, "F", 0)[at + 1 :])]])
            )
            for at in range(3)
        ),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except ScheduleError as error:
            refused += len(str(error)) < 8000
    assert refused > len(calls) // 2


def test_what_is_no_schedule_is_told_apart():
    remedy = "give what schedules.build, from_orders or Schedule.from_csv returned"
    assert refusal(check, None) == f"schedule=None is not a Schedule; {remedy}"
    assert refusal(check, Schedule(None, 1, ONE, (0,))) == (
        "Schedule(name=None): a name is a string; correct it"
    )
    assert refusal(check, Schedule("x", HUGE, ONE, (0,))) == (
        "Schedule(num_microbatches=<int>): must be an integer, how many microbatches there are; "
        "correct it"
    )
    assert refusal(check, Schedule("x", 1, None, (0,))) == (
        "Schedule(orders=None): orders are a tuple of S tuples of Action, one for each rank; "
        "correct it"
    )
    assert refusal(check, Schedule("x", 1, ONE, 0)) == (
        "Schedule(placement=0): a placement is a tuple of K ranks, one for each stage; correct it"
    )
    assert refusal(simulate, S, 3) == (
        "costs=3 is not a Costs; give schedules.Costs(f=..., i=..., w=..., b=...), or None"
    )
    for save in (save_trace, save_timeline):
        given = "give what simulate() returned, one or several"
        assert refusal(save, [S], "x.svg").endswith(f" is not a Report; {given}")
        assert refusal(save, 3, "x.svg") == f"reports=3 is not a Report; {given}"
    assert refusal(simulate, S, partners=1) == "partners=1 is not a bool; give True or False"
    assert refusal(from_orders, [["0F0"]], placement=3) == (
        "placement hold 3, which is not one rank for each stage; give that"
    )


def test_messages_stay_short_whatever_stands_in_a_schedule():
    long = "x" * 100_000
    for schedule in (
        Schedule(long, 1, (ONE[0] * 2,), (0,)),
        Schedule("x", 1, ((Action(long, "F", 0), Action(HUGE, "F", 0), long, None),), (0,)),
        Schedule("x", 1, ONE, (long,)),
        Schedule("x", 1, ONE, (0,), ((HUGE,),)),
        Schedule(
            "x", 1, tuple((Action(r, "B", 0), Action(r, "F", 0)) for r in range(999)), range(999)
        ),
    ):
        refusal(check, schedule)
    message = refusal(check, Schedule("x", 1, ((Action("\x1b[31m", "F", 0),),), (0,)))
    assert message.replace("\n", "").isprintable()
    assert "\nrank 0 [Action(stage='\\x1b[31m', kind='F', mi...]  missing 0F0" in message


def test_a_message_has_a_path_of_up_to_199_characters_as_it_is():
    assert shown("x" * 199) == "x" * 199
    assert shown("x" * 200).startswith("'xxx")
    assert len(shown("x" * 5000)) <= 210


def test_many_ranks_above_a_limit_or_in_circles_are_counted():
    wide = build("gpipe", num_ranks=1000, num_microbatches=3)
    assert "; and 992 more\n" in refusal(check, wide, max_activations=1)
    built = build("gpipe", num_ranks=200, num_microbatches=2, num_stages=400)
    orders = tuple(tuple(a for a in order if a.kind == "F")[::-1] for order in built.orders)
    assert "deadlock" in refusal(check, Schedule("x", 2, orders, built.placement))


def test_durations_whose_sums_overflow():
    rule = "sums of durations above 1e+200 overflow; choose a larger unit, the same for all"
    assert refusal(Costs, f=1e308) == f"Costs(f=1e+308): {rule}"
    durations = dict.fromkeys(MEASURED, 1e300)
    assert refusal(simulate, S, clock="measured", durations=durations) == (
        f"durations[0F0]=1e+300: {rule}"
    )
    report = simulate(S, Costs(f=1e200, i=1e200, w=1e200))
    assert np.isfinite(json.loads(json.dumps(report_record(report)))["makespan"])


def test_the_smallest_durations():
    tiny = 5e-324
    choice = auto(4, 8, costs=Costs(tiny, tiny, tiny, tiny), budget=100)
    assert choice.report.makespan > 0


def test_no_rate_is_below_zero():
    """1 - work / whole can be -2e-16, which prints as -0.0%."""
    for f, i, w in itertools.product((0.1, 1 / 3, 0.7), repeat=3):
        report = simulate(build("gpipe", num_ranks=1, num_microbatches=7), Costs(f, i, w))
        assert report.bubble_rate >= 0
        assert report.step_bubble_rate >= 0


def test_many_stages_on_a_rank_take_no_time():
    schedule = build("gpipe", num_ranks=1, num_microbatches=1, num_stages=30_000)
    assert schedule.chunk_of == tuple(range(30_000))


def test_the_default_pattern_is_the_fastest_of_all_four():
    """Partner slots are possible if messages take time, although all ranks meet."""
    away = [[abs(a - b) for b in range(8)] for a in range(8)]
    schedule = build("interleaved_zb", num_ranks=8, num_microbatches=8, num_stages=16)
    mixed = from_orders(
        [
            ["0F0", "2F0", "0F1", "2F1", "2I0", "2W0", "2B1", "0B0", "0I1", "0W1"],
            ["1F0", "3F0", "3I0", "1F1", "3F1", "3B1", "3W0", "1B0", "1I1", "1W1"],
        ]
    )
    for s, costs in ((schedule, Costs(comm=away)), (mixed, Costs(f=1, i=2, w=0.5))):
        times = [
            simulate(s, costs, "lockstep", pattern=pattern).makespan
            for pattern in ("single", "paired", "unit", "partner")
        ]
        assert simulate(s, costs, "lockstep").makespan == min(times)
    assert simulate(schedule, Costs(comm=away), "lockstep").pattern == "partner"


# --- files ---


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    os.mkfifo(path)
    read = read_json if suffix == "json" else Schedule.from_csv
    assert refusal(read, path).startswith(
        f"'{path}': cannot be read as a timetable: Is a pipe or a device, no file; give "
    )


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    replace("0F0\n", path)
    assert os.read(reader, 100) == b"0F0\n"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_json_that_contradicts_itself(tmp_path):
    path = tmp_path / "x.json"
    record = {"num_microbatches": 99, "placement": [0], "orders": [["0F0"]]}
    path.write_text(json.dumps(record))
    assert refusal(read_json, path) == (
        f"'{path}': num_microbatches is 99, but the orders run 1; correct it, or add the actions "
        f"that are missing"
    )
    path.write_text(json.dumps({**record, "num_microbatches": 1, "placement": [10**30]}))
    assert "a placement is a tuple of ranks" in refusal(read_json, path)


def test_paths_and_names_send_no_escapes_to_the_terminal(tmp_path, capsys):
    bad, good = tmp_path / "b\x1b[31m.csv", tmp_path / "g\x1b[31m.csv"
    bad.write_text("0F0,zz\n")
    S.to_csv(good)
    for arguments in (
        *(["check", str(path)] for path in (bad, good)),
        *([command, str(path)] for command in ("draw", "table", "compare") for path in (bad, good)),
        ["draw", "no\x1b[31m"],
        ["draw", "1f1b", "-S", "2", "-M", "2", "-o", "no\x1b[31m/x.html"],
        ["convert", str(good), "\x1b[31mx"],
        ["convert", str(good), "no\x1b[31m/x.csv"],
        ["check", "\x1b[31m.csv"],
    ):
        main(arguments)
        shown = capsys.readouterr()
        assert "\x1b" not in shown.out + shown.err


# --- the command line ---

SIZES = ["-S", "4", "-M", "8"]


def test_no_output_is_written_if_one_of_them_cannot_be(tmp_path):
    page = tmp_path / "x.html"
    assert main(["draw", "1f1b", *SIZES, "-o", str(page), "-o", "x.bad"]) == 2
    assert not page.exists()


def test_auto_by_name_minds_the_max_activations(capsys):
    assert main(["table", "auto", *SIZES, "--max-activations", "2", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert max(rank["peak_activations"] for rank in ranks) <= 2


@pytest.mark.few
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_closed_streams(closed):
    root = Path(schedules.__file__).parents[1]
    for command, code in (
        ("table 1f1b -S 2 -M 2", 0),
        ("draw 1f1b -S 2 -M 2", 0),
        ("table 1f1b", 2),
    ):
        done = subprocess.run(
            f"{sys.executable} -m schedules {command} {closed}",
            shell=True,
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["draw", "table"])
def test_a_full_standard_output_is_named(command):
    """Issue 52: no word of standard output."""
    done = subprocess.run(
        f"{sys.executable} -m schedules {command} 1f1b -S 2 -M 2 >/dev/full",
        shell=True,
        cwd=Path(schedules.__file__).parents[1],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "python -m schedules: standard output: No space left on device; give a path that can be "
        "read and written\n"
    )


def test_a_pipe_is_written_and_not_replaced():
    """As of `--out >(command)`, whose target has no path (issue 67)."""
    read, write = os.pipe()
    try:
        replace("0F0\n", f"/dev/fd/{write}")
        assert os.read(read, 100) == b"0F0\n"
    finally:
        os.close(read)
        os.close(write)
