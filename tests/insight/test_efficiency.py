"""`pipe.measure`: where the time of a step goes (issue 52). No test compares a time."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight.calibrate import efficiency
from pipeline.insight.calibrate.one_rank import entries
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.models import Hostile

X, T = models.rows(16), models.rows(16, seed=1)


class Counted(nnx.Module):
    """A stage that draws random numbers and counts its calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)
        self.drop, self.calls = nnx.Dropout(0.5, rngs=rngs), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.drop(self.linear(x))


CASES: list[tuple[Any, int, dict[str, Any]]] = [
    (Hostile, 2, {"schedule": "1f1b"}),
    (Hostile, 4, {"schedule": "zb_v", "remat": None}),
    (Hostile, 2, {"schedule": "gpipe", "offload": "stash", "remat": None}),
    (Counted, 2, {"state": nnx.BatchStat}),
    (Hostile, 4, {"schedule": "looped_bfs", "data_parallel": "fsdp", "gather": "repeat"}),
    (Hostile, 2, {"mesh": {"stage": 1}, "remat": None}),
    (Hostile, 4, {"schedule": "zb_v", "remat": None, "engine": "programs"}),
    (Counted, 2, {"state": nnx.BatchStat, "engine": "programs"}),
]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "K", "options"), CASES)
def test_the_parts_of_a_step_add_up_and_nothing_is_written(kind, K, options):
    data = 2 if "data_parallel" in options else 1
    options = {"mesh": {"stage": 2, "data": data}, **options}
    options["mesh"] = make_mesh(**options["mesh"])
    pipe = Pipeline(models.build(kind, K), 4, loss_fn=models.squares, **options)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(pipe, nnx.Not(nnx.RngState))))
    counts = [jax.random.key_data(x) if x.dtype != jnp.uint32 else x for x in streams(pipe)]
    found = pipe.measure(X, T, steps=3)
    after = nnx.to_pure_dict(nnx.state(pipe, nnx.Not(nnx.RngState)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    again = [jax.random.key_data(x) if x.dtype != jnp.uint32 else x for x in streams(pipe)]
    jax.tree.map(np.testing.assert_array_equal, again, counts)
    clear = [x for x in (found.efficiency, found.bubble, found.rest) if not np.isnan(x)]
    assert len(clear) == 3 or any("noise decides" in note for note in found.notes)
    assert found.efficiency == pytest.approx(found.ideal / found.step) or len(clear) < 3
    assert sum(clear) == pytest.approx(1) or len(clear) < 3
    assert len(found.steps) == len(found.works) == 3
    assert 0 <= found.rank < pipe.schedule.num_ranks
    lines = [line.split()[0] for line in str(found).splitlines()]
    assert lines[:5] == ["step", "ideal", "efficiency", "bubble", "rest"]
    schedules.simulate(pipe.schedule, found.costs)


def streams(pipe: Pipeline) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(pipe, nnx.RngState))


def test_every_action_is_timed_in_the_rank_and_the_kind_that_it_has():
    """The entries of all ranks, and those of all stages and kinds, are the table's."""
    pipe = Pipeline(
        models.build(Hostile, 4),
        4,
        schedule="zb_v",
        remat=None,
        loss_fn=models.squares,
        mesh=make_mesh(stage=2),
    )
    program = pipe.plan.training
    ranks = [entries(program, range(2), rank=rank) for rank in range(2)]
    assert (sum(ranks) == (program.op > 0)).all()
    parts = [
        entries(program, [chunk], kind, rank=rank)
        for rank in range(2)
        for chunk in range(2)
        for kind in "FBIW"
    ]
    assert (sum(parts) == (program.op > 0)).all()
    assert [int(part.sum()) for part in parts] == [4, 0, 4, 4] * 4


def test_every_action_of_programs_is_timed():
    options = {"schedule": "zb_v", "remat": None, "engine": "programs", "mesh": make_mesh(stage=2)}
    pipe = Pipeline(models.build(Hostile, 4), 4, loss_fn=models.squares, **options)
    found = efficiency.ProgramActions(pipe.plan, pipe._operands(X, T, None, "measure"))
    calls = collections.Counter()
    for name, run in found._programs.compiled.items():
        found._programs.compiled[name] = lambda *a, name=name, run=run: (
            calls.update([name]) or run(*a)
        )
    costs = efficiency._costs(pipe.plan, found)
    assert {name: n for name, n in calls.items() if name[0] in "FIW"} == {
        (kind, k, 0): 4 for kind in "FIW" for k in range(4)
    }
    assert all(len(times) == 4 and max(times) > 0 for times in (costs.f, costs.i, costs.w))


@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_work_of_all_ranks_is_work_of_each(engine):
    """A table of the scan cannot leave it out, so both engines time it as programs."""
    embed = VocabularyEmbedding(11, models.WIDTH, rngs=nnx.Rngs(0))
    ends = {"embed": embed, "head": VocabularyHead(11, models.WIDTH, tied=embed)}
    options = {"mesh": make_mesh(stage=2), "loss_fn": CrossEntropy(), "vocabulary": "stage"}
    pipe = Pipeline(models.build(Hostile, 2), 4, engine=engine, **ends, **options)
    ids = models.words(16, most=11)
    found = pipe.measure(ids, ids, steps=2)
    assert found.clock == {"scan": "lockstep", "programs": "event"}[engine]
    times = efficiency.ProgramActions(pipe.plan, pipe._operands(ids, ids, None, "measure")).times()
    assert min(times["lookup", 0], times["head", 1], times["scatter", 0]) > 0
    assert min(found.costs.head, found.costs.embed) > 0


def test_a_busy_machine_and_few_cores_are_said_beside_the_numbers(monkeypatch):
    pipe = Pipeline(models.build(Hostile, 4), 4, loss_fn=models.squares, mesh=make_mesh(stage=4))
    monkeypatch.setattr(efficiency.os, "cpu_count", lambda: 2)
    notes = efficiency._notes(pipe.plan, {"ideal": [1.0, 1.0, 1.4, 1.5]}, 1.26)
    spans = "the middle half of the times of ideal spans 425 ms around 1.2e+03 ms"
    assert notes == [
        "other programs kept 1.3 cores busy: repeat it on a quiet machine",
        f"{spans}: take more steps=, or longer ones",
        "4 virtual devices share 2 cores: ranks wait for a core, which counts as rest",
    ]
    monkeypatch.setattr(efficiency.os, "cpu_count", lambda: 4)
    assert efficiency._notes(pipe.plan, {"step": [1.0, 1.01]}, 0.01) == []


def measured(monkeypatch, clock, **options: Any) -> efficiency.Efficiency:
    """Measure two stages by a clock: a function of a run's number of table entries, or None."""
    pipe = Pipeline(
        models.build(Hostile, 2), 4, loss_fn=models.squares, mesh=make_mesh(stage=2), **options
    )
    monkeypatch.setattr(efficiency, "_busy_elsewhere", lambda: 0.0)

    def fake(run):
        entries_of_run = getattr(run, "args", None)
        return clock(None if entries_of_run is None else int(entries_of_run[0].sum()))

    monkeypatch.setattr(efficiency, "seconds", fake)
    return pipe.measure(X, T, steps=4)


def test_figures_of_a_clear_clock_are_those_of_its_durations(monkeypatch):
    """A step of 1 s and 0.05 s for each of a rank's eight actions, above 0.1 s for nothing."""
    found = measured(monkeypatch, lambda n: 1.0 if n is None else 0.1 + 0.05 * n)
    assert [*found.costs.f, *found.costs.b] == pytest.approx([0.05] * 4)
    assert found.ideal == pytest.approx(0.4)
    assert found.efficiency == pytest.approx(0.4)
    assert found.bubble == pytest.approx(0.4 * (10 / 8 - 1))
    assert found.efficiency + found.bubble + found.rest == pytest.approx(1)
    assert not any("noise" in note for note in found.notes)


REPEAT = "take more steps=, larger microbatches, or a quiet machine"
NOISE = {
    "a clock that stands still": (
        lambda n, turn: 0.0,
        {"step", "ideal", "efficiency", "bubble", "rest"},
        (
            "4 measurements of step have the median 0 ms and differ from it by 0 ms: noise "
            "decides it, and what is computed from it"
        ),
    ),
    "work that is lost in the noise": (
        lambda n, turn: 1.0 if n is None else 0.1 + 0.01 * (n > 0) * (turn // 4 % 2),
        {"ideal", "efficiency", "bubble", "rest"},
        (
            "4 measurements of ideal have the median 5 ms and differ from it by 5 ms: noise "
            "decides it, and what is computed from it"
        ),
    ),
    "work that is longer than the step": (
        lambda n, turn: 0.2 if n is None else 0.1 + 0.05 * n,
        {"efficiency", "bubble", "rest"},
        (
            "the work of a rank took 400 ms, longer than the whole step: noise decides efficiency, "
            "bubble and rest"
        ),
    ),
    "actions that take no time": (
        lambda n, turn: 1.0 if n is None else 0.1 + 0.5 * (n > 4),
        {"bubble", "rest"},
        "by 3 measurements of the actions the bubble is -, -, -: noise decides bubble and rest",
    ),
    "actions of one rank that take no time": (
        lambda n, turn: 1.0 if n is None else 0.1 + 0.05 * n * (n > 4 or turn % 5 in (1, 2)),
        {"bubble", "rest"},
        (
            "the actions of rank 1 take 0 ms kind by kind, and 400 ms together: noise decides "
            "bubble and rest"
        ),
    ),
    "actions that differ": (
        lambda n, turn: 1.0 if n is None else 0.1 + 0.06 * n * (1 if n > 4 else turn % 5),
        {"bubble", "rest"},
        None,
    ),
}


@pytest.mark.parametrize("kind", NOISE)
def test_a_figure_that_noise_decides_is_a_dash_with_its_reason(kind, monkeypatch):
    """Issue 67: "bubble 0.0%" and "efficiency 182%" of durations below the clock's noise."""
    clock, dashes, reason = NOISE[kind]
    turns = itertools.count()
    found = measured(monkeypatch, lambda n: clock(n, next(turns)))
    names = "step", "ideal", "efficiency", "bubble", "rest"
    assert {name for name in names if np.isnan(getattr(found, name))} == dashes
    rows = dict(line.split()[:2] for line in str(found).splitlines()[:5])
    assert {name for name, value in rows.items() if value == "-"} == dashes
    if reason is None:
        assert "noise decides bubble and rest" in found.notes[0]
    else:
        assert found.notes[0] == f"{reason}; {REPEAT}"


def test_a_step_that_is_traced_is_not_measured():
    pipe = Pipeline(models.build(Hostile, 2), 4, loss_fn=models.squares)
    with pytest.raises(ValueError) as caught:
        jax.jit(lambda x: pipe.measure(x, T).step)(X)
    assert str(caught.value) == (
        "measure() runs steps on the devices and times them, and its batch or its weights are "
        "traced: call it outside of jax.jit and other transformations"
    )


@pytest.mark.parametrize("steps", [0, 2.5, "10", True])
def test_a_number_of_steps_that_is_no_count_is_refused(steps):
    pipe = Pipeline(models.build(Hostile, 2), 4, loss_fn=models.squares)
    with pytest.raises(ValueError) as caught:
        pipe.measure(X, T, steps=steps)
    assert str(caught.value) == (
        f"steps={steps!r}: must be an integer >= 1, how many steps are timed"
    )
