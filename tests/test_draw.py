"""Pictures: they are written, they say what they show, and they are the same every time."""

from __future__ import annotations

import itertools
import sys

import pytest

from schedules import Costs, ScheduleError, build, from_orders, simulate
from schedules.draw import COLOURS, save_timeline

REPORT = simulate(build("1f1b", num_ranks=2, num_microbatches=3, num_stages=4))


def test_png(tmp_path):
    path = tmp_path / "timeline.png"
    save_timeline(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    before = path.read_bytes()
    save_timeline(REPORT, path)
    assert path.read_bytes() == before


def test_svg_says_what_it_shows(tmp_path):
    split = from_orders([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]], name="cost of $5")
    reports = [REPORT, simulate(split, Costs(1, 1.5, 0.5), clock="lockstep", pattern="single")]
    path = tmp_path / "timeline.SVG"
    save_timeline(reports, str(path), title="a title")
    text = path.read_text(encoding="utf-8")
    for comment in (
        "a title",
        "1f1b   S=2 K=4 M=3   event   bubble 18.2%   makespan 22",
        "cost of $5   S=2 K=2 M=1   lockstep, single ticks   bubble 45.5%   makespan 5.5",
        "rank 1",
        "F  forward",
        "B  backward",
        "I  input gradient",
        "W  weight gradient",
        "idle",
        "chunk 1",
        "time, in the unit of the costs",
    ):
        assert f"<!-- {comment} -->" in text
    for colour in COLOURS.values():
        assert colour.lower() in text


def test_kinds_differ_without_colour():
    """Luminance of any two kinds is apart, so that a grey print can be read."""
    levels = sorted(
        sum(
            weight * int(colour[n : n + 2], 16)
            for n, weight in ((1, 0.299), (3, 0.587), (5, 0.114))
        )
        for colour in COLOURS.values()
    )
    assert min(high - low for low, high in itertools.pairwise(levels)) > 25


def test_what_takes_no_time_can_be_drawn(tmp_path):
    report = simulate(build("gpipe", num_ranks=2, num_microbatches=2), Costs(0, 0, 0))
    save_timeline(report, tmp_path / "nothing.png")


def refusal(*args) -> str:
    with pytest.raises(ScheduleError) as caught:
        save_timeline(*args)
    return str(caught.value)


def test_what_cannot_be_drawn(tmp_path):
    assert refusal([], tmp_path / "a.png") == (
        "reports is empty; give what simulate() returned, one or several"
    )
    assert refusal(REPORT, "a.jpeg") == (
        "path='a.jpeg' ends in '.jpeg'; a timeline is written as .png or .svg, so choose one of "
        "those suffixes"
    )


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        save_timeline(REPORT, tmp_path / "a.png")
    assert str(caught.value) == (
        "save_timeline draws with matplotlib, which is not installed; "
        "pip install shardpipe[examples]"
    )
