"""The grid in a terminal: what it says in letters, what it colours, what it never lets through."""

from __future__ import annotations

import io
import re

import pytest

from schedules import Costs, ScheduleError, build, from_orders, simulate
from schedules.core.grid import grid
from schedules.tools.palette import ANSI
from schedules.tools.terminal import render, wants_colour

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ONE = build("1f1b", num_ranks=2, num_microbatches=3)
CHUNKS = build("zb_v", num_ranks=2, num_microbatches=2, num_stages=4)


def test_a_schedule_in_letters():
    assert render(ONE, colour=False) == (
        "1f1b   2 ranks, 2 stages, 3 microbatches\n"
        "rank 0   0F0  0F1    .  0B0  0F2  0B1    .  0B2\n"
        "rank 1     .  1F0  1B0  1F1  1B1  1F2  1B2    .\n"
        " F  forward   B  backward  . idle"
    )


@pytest.mark.parametrize("schedule", [ONE, CHUNKS, build("gpipe", num_ranks=3, num_microbatches=5)])
def test_it_has_the_columns_of_the_grid(schedule):
    rows = [line.split() for line in grid(schedule).splitlines()[1:]]
    drawn = render(schedule, colour=False).splitlines()[1:-1]
    assert [line.split() for line in drawn] == rows


def test_one_character_per_unit_of_time():
    report = simulate(ONE, Costs(f=2, i=2, w=1, comm=1))
    assert render(report, colour=False, unit=1) == (
        "1f1b   2 ranks, 2 stages, 3 microbatches   event   bubble 37.5% of the step   makespan 24"
        "   one character = 1\n"
        "rank 0  F0F1.....B0-F2B1-....B2-\n"
        "rank 1  ...F0B0-F1B1-..F2B2-....\n"
        " F  forward   B  backward  . idle"
    )


def test_bars_name_what_fits():
    report = simulate(from_orders([["0F0", "0B0"]]), Costs(f=3, i=5, w=4))
    rows = [render(report, colour=False, unit=unit).splitlines()[1] for unit in (1, 2, 3, 12, 50)]
    bars = ["F0-B0-------", "F0B0--", "FB0-", "B", "B"]
    assert rows == [f"rank 0  {bar}" for bar in bars]


def test_bars_tell_chunks_apart():
    lines = render(CHUNKS, colour=False, unit=1).splitlines()
    assert lines[1:3] == ["rank 0  FF.fiwfiwIW.IW", "rank 1  .FfFfiwIWiwIW."]
    assert lines[3].endswith("idle   lower case, underlined: a chunk beyond the first")
    assert "lower case" not in render(ONE, colour=False, unit=1)


@pytest.mark.parametrize("unit", [None, 0.5])
@pytest.mark.parametrize("schedule", [ONE, CHUNKS])
def test_colour_changes_no_character(schedule, unit):
    coloured, plain = (render(schedule, colour=c, unit=unit) for c in (True, False))
    stripped = ESCAPE.sub("", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
    assert "\x1b" not in plain


def test_every_kind_has_its_colour_and_chunks_a_line():
    text = render(CHUNKS)
    for kind in "FIW":
        (back, ink), (other, other_ink) = ANSI[kind]
        assert f"\x1b[38;5;{ink};48;5;{back}m 0{kind}0 " in text
        assert f"\x1b[4;38;5;{other_ink};48;5;{other}m 3{kind}0 " in text
    assert "\x1b[2m   . " in text


def test_the_two_of_a_pair_share_a_column():
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4)
    rows = [line.split() for line in grid(schedule).splitlines()[1:]]
    lines = render(schedule, colour=False).splitlines()[1:-1]
    assert [line.split() for line in lines] == rows
    (blue, ink), (other, other_ink) = ANSI["F"][0], ANSI["B"][1]
    pair = (
        f"\x1b[38;5;{ink};48;5;{blue}m 0F3&\x1b[0m\x1b[4;38;5;{other_ink};48;5;{other}m3B1 \x1b[0m"
    )
    assert pair in render(schedule)


def test_pairs_in_bars_are_joined():
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4)
    assert render(simulate(schedule, Costs(3, 3, 3, pair=9)), colour=False, unit=1).count("&") == 6
    apart = simulate(schedule, Costs(3, 3, 3), "lockstep")
    assert "F3&b1----" in render(apart, colour=False, unit=1)


def test_neighbours_of_one_look_share_an_escape():
    schedule = build("gpipe", num_ranks=1, num_microbatches=50)
    row = render(schedule).splitlines()[1]
    assert len(ESCAPE.findall(row)) == 4


def test_long_rows_go_on_below():
    lines = render(ONE, colour=False, width=23).splitlines()
    assert lines[1:-1] == [
        "rank 0   0F0  0F1    .",
        "rank 1     .  1F0  1B0",
        "",
        "rank 0   0B0  0F2  0B1",
        "rank 1   1F1  1B1  1F2",
        "",
        "rank 0     .  0B2",
        "rank 1   1B2    .",
    ]
    assert len(render(ONE, colour=False, width=1).splitlines()) == 2 + 8 * 2 + 7


@pytest.mark.parametrize("unit", [None, 1])
def test_a_name_cannot_command_the_terminal(unit):
    name = "a\x1b[31mb\rc\x9b2Jd\u202ee\ttab\x07"
    schedule = from_orders([["0F0", "0B0"]], name=name)
    for drawn in (schedule, simulate(schedule)):
        head = render(drawn, unit=unit).splitlines()[0]
        assert head.startswith(
            r"a\x1b[31mb\rc\x9b2Jd\u202ee\ttab\x07   1 ranks, 1 stages, 1 microbatches"
        )


def test_what_takes_no_time_and_what_is_no_schedule():
    nothing = simulate(ONE, Costs(0, 0, 0))
    assert render(nothing, colour=False, unit=1).splitlines()[1] == "rank 0  ."
    stuck = from_orders([["0B0", "0F0"]], name="stuck")
    assert render(stuck, colour=False).splitlines()[1] == "rank 0   0B0  0F0"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "wanted"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"TERM": "xterm-256color"}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal(), {"FORCE_COLOR": "0"}, False),
        (Terminal(), {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": ""}, False),
    ],
)
def test_when_to_colour(stream, environment, wanted):
    assert wants_colour(stream, environment) is wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width=0: a line has at least one character; give more"),
        (
            {"unit": 0},
            "unit=0: a character stands for a positive, finite time; give a number > 0",
        ),
        (
            {"unit": float("nan")},
            "unit=nan: a character stands for a positive, finite time; give a number > 0",
        ),
        (
            {"unit": 1e-9},
            (
                "unit=1e-09 makes rows of 1.2e+10 characters, the most is 1000000; the makespan "
                "is 12, so give a larger unit"
            ),
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ScheduleError) as caught:
        render(ONE, **options)
    assert str(caught.value) == message
