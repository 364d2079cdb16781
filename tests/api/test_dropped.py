"""What a dropped pipeline leaves behind: nothing that was traced or compiled for it."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import jax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.kernel import jitted
from tests.support import models

X = models.rows(4)


def make(traced: list[None] | None = None) -> Pipeline:
    """A pipeline whose loss counts how often it is traced."""

    def loss_fn(y, t):
        if traced is not None:
            traced.append(None)
        return models.squares(y, t)

    stages = models.build(models.Block, 2)
    return Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=loss_fn)


def executables() -> int:
    return len(jax.devices()[0].client.live_executables())


def test_what_is_dropped_goes_at_once() -> None:
    """Without the garbage collector, which comes late to what does not look large to it."""
    for again in (False, True):  # functions of JAX's own are compiled the first time
        gc.collect()
        gc.disable()
        try:
            pipe, before = make(), executables()
            pipe.value_and_grad(X, X)
            pipe.describe(X, X)
            plan, compiled = weakref.ref(pipe.plan), executables()
            del pipe
            assert plan() is None
            assert compiled > before
            assert executables() == before or not again
        finally:
            gc.enable()


def test_plans_that_only_graphs_hold_keep_what_the_last_of_them_compiled(monkeypatch) -> None:
    """A loop that merges in every step compiles once; what JAX remembers of `nnx.jit` is small."""
    monkeypatch.setattr(jitted, "KEPT", 1)
    traced: list[None] = []
    pipe = make(traced)
    nnx.jit(lambda pipe: pipe.value_and_grad(X, X))(pipe)
    plan = pipe.plan
    graphdef, state = nnx.split(pipe)
    del pipe
    gc.collect()
    nnx.merge(graphdef, state).value_and_grad(X, X)
    count = len(traced)
    nnx.merge(graphdef, state).value_and_grad(X, X)
    assert len(traced) == count > 0
    assert plan.traces.jitted
    other = make()
    other(X)
    assert plan.traces.jitted
    del other, graphdef
    later = make()
    later(X)
    kept = later.plan
    del later
    assert not plan.traces.jitted
    assert kept.traces.jitted


@pytest.mark.slow
def test_what_trainers_make_of_a_pipeline_goes_with_it(monkeypatch) -> None:
    """Gradients of `loss` and of outputs, under `nnx.jit` and not."""
    monkeypatch.setattr(jitted, "KEPT", 1)
    found = []
    for _ in range(3):
        pipe = make()
        nnx.grad(lambda pipe: pipe.loss(X, X))(pipe)
        nnx.grad(lambda pipe: pipe(X).sum())(pipe)
        nnx.jit(lambda pipe: pipe.value_and_grad(X, X))(pipe)
        del pipe
        gc.collect()
        found.append(executables())
    assert found[1] == found[2]


def test_a_step_writes_nothing_into_its_plan_but_what_it_traced() -> None:
    pipe = make()
    fields = [one.name for one in dataclasses.fields(pipe.plan) if one.name != "traces"]
    before = {name: getattr(pipe.plan, name) for name in fields}
    pipe.value_and_grad(X, X)
    pipe.describe()
    assert {name: getattr(pipe.plan, name) for name in fields} == before
    assert pipe.plan.traces.last is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipe.plan.remat = None
