"""Colours that all drawings share: told apart by colour-blind readers, and without colour."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest

from schedules import Costs, build, from_orders, simulate
from schedules.clocks.report import Cause
from schedules.core.action import KINDS
from schedules.tools.palette import ANSI, CAUSES, DARK, LIGHT, NAMES, clock_name, heading, joined

# G. M. Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# IEEE Transactions on Visualization and Computer Graphics 15(6), 2009: full severity, linear RGB.
SIGHTS = {
    "full": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LADDER = ("B", "I", "F", "W")  # from dark to light
themes = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


def linear(colour: str) -> np.ndarray:
    """[3] linear RGB of ``#RRGGBB``."""
    value = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """[3] CIE L*a*b* of linear RGB, white D65."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    dark, light = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def xterm(number: int) -> str:
    """``#RRGGBB`` of one of the 240 fixed colours of a terminal."""
    if number >= 232:
        return f"#{8 + 10 * (number - 232):02x}" + f"{8 + 10 * (number - 232):02x}" * 2
    cube = np.unravel_index(number - 16, (6, 6, 6))
    return "#" + "".join(f"{0 if n == 0 else 55 + 40 * n:02x}" for n in cube)


@pytest.mark.parametrize("sight", SIGHTS)
@themes
def test_kinds_and_idle_time_differ_in_every_sight(theme, sight):
    colours = [*theme.fill.values(), theme.idle]
    seen = [lab(SIGHTS[sight] @ linear(colour)) for colour in colours]
    apart = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    assert min(apart) > 25


@themes
def test_a_print_without_colour_is_a_ladder(theme):
    levels = [lab(linear(theme.fill[kind]))[0] for kind in LADDER]
    assert min(high - low for low, high in itertools.pairwise(levels)) > 10
    idle = lab(linear(theme.idle))[0]
    assert min(abs(idle - level) for level in levels) > 10


@themes
def test_what_stands_in_a_box_can_be_read(theme):
    for kind in KINDS:
        assert contrast(theme.fill[kind], theme.ink[kind]) >= 4.5, kind


def test_terminals_likewise():
    for chunk in (0, 1):
        levels = [lab(linear(xterm(ANSI[kind][chunk][0])))[0] for kind in LADDER]
        assert min(high - low for low, high in itertools.pairwise(levels)) > 10
    for kind, looks in ANSI.items():
        assert looks[0][0] != looks[1][0], kind
        for back, ink in looks:
            assert contrast(xterm(back), xterm(ink)) >= 4.5, kind


def test_nothing_lacks_a_name_or_a_colour():
    assert tuple(CAUSES) == get_args(Cause)
    for table in (NAMES, ANSI, LIGHT.fill, LIGHT.ink, DARK.fill, DARK.ink):
        assert sorted(table) == sorted(KINDS)


def test_a_heading_gives_both_bubbles_and_no_control_characters():
    report = simulate(build("zb_v", num_ranks=4, num_microbatches=8, num_stages=8))
    assert heading(report) == (
        "zb_v   4 ranks, 8 stages, 8 microbatches   event   bubble 5.9% of the step   makespan 51"
    )
    schedule = from_orders([["0F0", "0B0"]], name="a\x1bb")
    two = build("gpipe", num_ranks=2, num_microbatches=1)
    assert clock_name(simulate(two, clock="lockstep", delayed=True, pattern="single")) == (
        "lockstep, single ticks, delayed"
    )
    partners = simulate(schedule, clock="lockstep", pattern="single", partners=True)
    assert heading(partners).startswith(
        r"a\x1bb   1 ranks, 1 stages, 1 microbatches   lockstep, single ticks, partners   "
    )
    assert clock_name(report) == "event"


def test_pairs_are_joined_where_nothing_lies_between():
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4)
    overlapped = simulate(schedule, Costs(pair=1.5))
    assert tuple(joined(overlapped, rank) for rank in (0, 1)) == schedule.pairs
    slots = simulate(schedule, Costs(1, 1, 1, comm=1), "lockstep")
    assert joined(slots, 0) == ()
