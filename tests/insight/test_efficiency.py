"""`pipe.measure`: where the time of a step goes (issue 52). No test compares a time."""

from __future__ import annotations

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
    assert found.efficiency == found.ideal / found.step
    assert found.efficiency + found.bubble + found.rest == pytest.approx(1)
    assert len(found.steps) == len(found.works) == 3
    assert found.step > 0
    assert found.bubble >= 0
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
