"""Loops of the kernel: a new one starts where a timetable needs fewer exchanges."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from collectives import make_mesh
from pipeline import Pipeline
from schedules import build, lower, names
from schedules.lowering.needs import UNUSED, WAIT, WORK, needed, segment_starts, segments, without
from tests.support import models
from tests.support.sizes import CHUNKS


def program(family: str, *, S=4, M=8, V=None, **options):
    V = V or CHUNKS.get(family, 1)
    return lower(build(family, num_ranks=S, num_microbatches=M, num_stages=S * V), **options)


def forward_first(schedule) -> bool:
    """True if every rank finishes all forwards before it goes back."""
    kinds = ["".join(a.kind for a in order if a.kind in "FBI") for order in schedule.orders]
    return all("F" not in one.lstrip("F") for one in kinds)


def test_two_families_finish_all_forwards_first():
    found = {name for name in names() if forward_first(program(name).schedule)}
    assert found >= {"gpipe", "looped_bfs"}
    assert not found & {"1f1b", "eager_1f1b", "zb_h1", "zb_v"}


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("options", [{}, {"keep": "residuals"}, {"shared": ("embed", "head")}])
def test_who_takes_a_turn(family, options):
    """Only those that finish all forwards first: there each part of the ticks goes one way."""
    found = program(family, **options)
    T, turns = found.num_ticks, forward_first(found.schedule)
    starts = segment_starts(found)
    parts = segments(found)
    assert [part[:2] for part in parts] == list(itertools.pairwise([0, *starts, T]))
    assert len(starts) == turns
    kinds, shifts = [], []
    for start, stop, _ in parts:
        need = [needed(found, n, start, stop) for n in range(len(found.slots))]
        kinds.append({op.kind for one in need for op in one.slot.ops})
        shifts.append({c.shift for one in need for _, c in one.channels if c.shift})
    if turns:
        assert kinds[0] == {"F"}
        assert "F" not in kinds[1]
        assert [len(one) for one in shifts] == [1, 1]
    else:  # one loop does all that the slots do
        assert kinds == [{op.kind for slot in found.slots for op in slot.ops}]
        assert shifts == [{c.shift for slot in found.slots for c in slot.channels if c.shift}]
        assert len(shifts[0]) == 2


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("delayed", [False, True])
def test_nothing_is_left_out(family, delayed):
    """Every action and every message that is read lies in the run that its tick is in."""
    found = program(family, delayed=delayed, M=9 if family == "dualpipe_v" else 3)
    actions, messages = 0, 0
    for start, stop, _ in segments(found):
        for index, slot in enumerate(found.slots):
            need = needed(found, index, start, stop)
            op = found.op[start:stop, index]
            assert [need.slot.ops[n - 1] for n in need.branch[op[op > 0]]] == [
                slot.ops[n - 1] for n in op[op > 0]
            ]
            actions += (need.branch[op] > 0).sum()
            for column, channel in need.channels:
                assert channel.shift == slot.channels[column].shift
                assert set(channel.edges) <= set(slot.channels[column].edges)
                messages += found.arrives[start:stop, index, :, column].sum()
    assert actions == sum(map(len, found.schedule.orders))
    assert messages == found.arrives.sum()


@pytest.mark.parametrize(("delayed", "last"), [(False, UNUSED), (True, WAIT)])
def test_slots_in_which_messages_only_arrive(delayed, last):
    """Ranks exchange and store in them, and compute nothing."""
    found = program("gpipe", S=2, M=2, pattern="unit", delayed=delayed)
    assert segments(found) == [(0, 5, (WORK, WORK, last))]


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_that_no_stage_needs_are_not_sent(delayed):
    """With stages 2 and 3 trained, only stage 3 sends a gradient; activations are all sent."""
    M = 5
    found = program("1f1b", M=M, delayed=delayed)
    kept = without(found, [False, False, False, True])
    removed = (found.arrives & ~kept.arrives).sum(axis=(0, 1, 3))
    assert removed.tolist() == [M, M, 0, 0]
    assert kept.arrives.sum() == found.arrives.sum() - 2 * M
    assert without(found, [True] * 4) is found


@pytest.mark.few
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpipe", {"remat": None}),
        ("looped_bfs", {"pattern": "single"}),
        ("gpipe", {"delayed": True}),
        pytest.param("zb_v", {"M": 1}, marks=pytest.mark.slow),
        pytest.param("v_half", {"M": 1, "remat": None}, marks=pytest.mark.slow),
        pytest.param("1f1b", {"M": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_stay_the_same(family, options):
    options = dict(options)
    M, V = options.pop("M", 4), 1 if family in ("gpipe", "1f1b") else 2
    stages, x = models.build(models.Hostile, 4 * V), models.rows(4 * M)
    t = models.rows(4 * M, seed=1)
    mesh = make_mesh(stage=4)
    pipe = Pipeline(stages, M, mesh=mesh, schedule=family, loss_fn=models.squares, **options)
    assert len(segments(pipe.plan.training)) > 1 or "delayed" in options
    want = models.reference(stages, x, t, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


@pytest.mark.few
@pytest.mark.parametrize("S", [2, 4])
def test_two_loops_exchange_less_than_one(S):
    """Each permute joins neighbours in one direction alone."""
    mesh, x = make_mesh(stage=S), models.rows(8)
    stages = models.build(models.Block, S)
    pipe = Pipeline(stages, 4, mesh=mesh, schedule="gpipe", loss_fn=models.squares)
    edges = re.findall(r"source_target_pairs = dense<(.*?)>", pipe.lower(x, x).as_text())
    right = [[r, r + 1] for r in range(S - 1)]
    assert sorted(map(json.loads, edges)) == [right, [edge[::-1] for edge in right]]
