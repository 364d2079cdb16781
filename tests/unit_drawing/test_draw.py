"""Pictures: they are written, they say what they show, and they are the same every time."""

from __future__ import annotations

import sys

import pytest

from schedules import Costs, ScheduleError, build, from_orders, simulate
from schedules.tools.draw import save_timeline
from schedules.tools.palette import LIGHT

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
    save_timeline(reports, str(path), title="a title", unit="ms")
    text = path.read_text(encoding="utf-8")
    for comment in (
        "a title",
        "1f1b: 2 ranks, 4 stages, 3 microbatches; event; makespan 22 ms, bubble 18.2%",
        (
            "cost of $5: 2 ranks, 2 stages, 1 microbatches; lockstep, single ticks; "
            "makespan 5.5 ms, bubble 45.5%"
        ),
        "rank 1",
        "F  forward",
        "B  backward",
        "I  input gradient",
        "W  weight gradient",
        "chunk 1",
        "fill",
        "drain",
        (
            "time in ms; predicted: a rank waits only for its data; predicted in lockstep: "
            "in every slot all ranks wait for the slowest"
        ),
    ):
        assert f"<!-- {comment} -->" in text
    for colour in LIGHT.fill.values():
        assert colour.lower() in text


def test_waits_and_pairs_are_named(tmp_path):
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=5, num_stages=4)
    path = tmp_path / "timeline.svg"
    save_timeline(simulate(schedule, Costs(3, 3, 3, comm=2, pair=8)), path)
    text = path.read_text(encoding="utf-8")
    for comment in ("overlapped pair", "fill", "communication", "imbalance"):
        assert f"<!-- {comment} -->" in text
    save_timeline(simulate(schedule, Costs(3, 3, 3, comm=2), "lockstep"), path)
    text = path.read_text(encoding="utf-8")
    assert "<!-- lockstep -->" in text
    save_timeline(simulate(build("gpipe", num_ranks=1, num_microbatches=2)), path)
    text = path.read_text(encoding="utf-8")
    assert "overlapped pair" not in text
    assert "fill -->" not in text


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
