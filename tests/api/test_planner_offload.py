"""`pipeline.plan(offload="auto")`: stashes in host memory against computing again (issue 42).

Letters: P the most stashes that a rank holds at once.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from pipeline import plan
from pipeline.planner import CHIPS
from pipeline.planner.makespan import places
from pipeline.planner.memory import COPIES, host_bytes, pipeline_bytes, stash_bytes, usable
from pipeline.planner.plans import Plans, configuration

JOB: dict[str, Any] = {"model": "llama-8b", "devices": 16, "batch": 64, "seq": 8192}
FEW: dict[str, Any] = {"schedules": ("1f1b",), "remat": (None, "block"), "offload": "auto"}
V5E = CHIPS["v5e"]


@functools.cache
def planned(host: float = 60e9, overlap: float = 1.0) -> Plans:
    return plan(**JOB, **FEW, chip=replace(V5E, host=host, host_overlap=overlap))


@pytest.mark.few
@pytest.mark.parametrize(("host", "overlap", "wins"), [(60e9, 1.0, True), (8e9, 0.0, False)])
def test_offload_wins_where_copies_hide(host, overlap, wins):
    """A fast link beside products beats computing again; a slow one that waits does not."""
    plans = planned(host, overlap)
    assert plans.pipeline is not None
    layout = plans.pipeline.layout
    assert (layout.offload is not None) is wins
    assert layout.remat == (None if wins else "block")
    assert plans.offload.startswith("offload: " if wins else "do not offload: ")
    assert str(plans).splitlines()[2] == plans.offload


def test_the_sentence_names_both_and_their_prices():
    plans = planned()
    assert plans.pipeline is not None
    share, hidden = plans.pipeline.layout.offload, plans.pipeline.seconds["host"]
    assert share is not None
    assert (
        f"with remat none and {share:.0%} of stashes on the host takes {plans.pipeline.step:.4g} "
        f"s, of which copies that no work hides take {hidden:.3g} s; the best pipeline without, "
    ) in plans.offload
    assert "with remat block, " in plans.offload


def test_the_share_is_the_smallest_that_fits():
    plans = planned()
    assert plans.pipeline is not None
    layout, room = plans.pipeline.layout, usable(plans.job)
    assert layout.schedule is not None
    assert layout.offload is not None
    most, _ = places(layout.schedule, layout.stage, layout.chunks, layout.microbatches)
    moved = math.floor(layout.offload * most + 1e-9)
    stash = stash_bytes(plans.job, layout)
    held = pipeline_bytes(plans.job, layout)
    assert sum(held.values()) <= room < sum(held.values()) + stash
    whole = pipeline_bytes(plans.job, replace(layout, offload=None))
    assert held["stashes"] == pytest.approx(whole["stashes"] - (moved - COPIES) * stash)
    assert host_bytes(plans.job, layout) == pytest.approx(moved * stash)
    assert host_bytes(plans.job, replace(layout, offload=None)) == 0


def test_a_plan_is_written_with_its_share():
    plans = planned()
    assert plans.pipeline is not None
    options = tomllib.loads(configuration(plans.job, plans.pipeline))["pipeline"]
    assert options["offload"] == plans.pipeline.layout.offload


def test_nothing_is_tried_without_the_option():
    options = {**FEW, "offload": None, "remat": ("block",)}
    plans = plan(**JOB, **options, chip=V5E)
    assert plans.offload == ""
    assert all(one.layout.offload is None for one in plans.ranked)


@pytest.mark.parametrize("offload", ["stash", 0.5, True])
def test_bad_input(offload):
    with pytest.raises(ValueError, match="offload") as caught:
        plan(**JOB, chip="v5e", offload=offload)
    assert str(caught.value) == (
        f"offload={offload!r}: must be 'auto' (stashes in host memory are tried where memory is "
        f"short) or None"
    )
