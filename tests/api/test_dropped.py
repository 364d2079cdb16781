"""A dropped pipeline leaves nothing that was traced or compiled for it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import jax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.options.compiled import REVIVED
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
    return len(alive())


def alive() -> list[Any]:
    return jax.devices()[0].client.live_executables()


def test_what_is_dropped_goes_at_once() -> None:
    """Without the garbage collector, which comes late to what does not look large to it."""
    for again in (False, True):  # functions of JAX's own are compiled the first time
        gc.collect()
        gc.disable()
        try:
            # JAX drops functions of other tests at any time, so these are held until the end.
            pipe, others = make(), alive()
            before = len(others)
            pipe.value_and_grad(X, X)
            pipe.describe(X, X)
            plan, compiled = weakref.ref(pipe.plan), executables()
            del pipe
            assert plan() is None
            assert compiled > before
            assert executables() == before or not again
        finally:
            gc.enable()


def test_a_clone_shares_what_is_compiled_and_outlives_the_pipeline() -> None:
    """Compiled functions live as long as any clone, also where `nnx.jit` remembers the graph."""
    traced: list[None] = []
    pipe = make(traced)
    pipe.value_and_grad(X, X)
    nnx.jit(lambda pipe: pipe.value_and_grad(X, X))(pipe)
    clone, count = nnx.clone(pipe), len(traced)
    compiled = weakref.ref(pipe.plan.compiled)
    plan = pipe.plan
    del pipe
    merged = nnx.merge(*nnx.split(clone))
    del clone
    gc.collect()
    merged.value_and_grad(X, X)
    assert len(traced) == count > 0
    assert plan.compiled is compiled() is not None
    del merged
    assert compiled() is None


def test_pipelines_that_graphs_make_again_compile_once() -> None:
    """A loop that merges in every step, and drops the pipeline behind it."""
    traced: list[None] = []
    graphdef, state = nnx.split(make(traced))
    gc.collect()
    nnx.merge(graphdef, state).value_and_grad(X, X)
    count = len(traced)
    nnx.merge(graphdef, state).value_and_grad(X, X)
    assert len(traced) == count > 0
    for _ in range(REVIVED):  # a process keeps only the last few of them
        nnx.merge(*nnx.split(make())).plan.programs.get()
    others = [nnx.split(make()) for _ in range(REVIVED)]
    gc.collect()
    assert [bool(nnx.merge(*other).plan.compiled.functions) for other in others] == [
        False
    ] * REVIVED
    nnx.merge(graphdef, state).value_and_grad(X, X)
    assert len(traced) == 2 * count


def test_another_number_of_microbatches_shares_what_is_compiled() -> None:
    traced: list[None] = []
    pipe = make(traced)
    first = pipe.loss(X, X, num_microbatches=4)
    count = len(traced)
    assert float(nnx.clone(pipe).loss(X, X, num_microbatches=4)) == float(first)
    assert len(traced) == count > 0
    assert [key.plan.num_microbatches for key in pipe.plan.compiled.functions] == [4]


@pytest.mark.slow
def test_what_trainers_make_of_a_pipeline_goes_with_it() -> None:
    """Gradients of `loss` and of outputs, under `nnx.jit` and not."""
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


def test_a_step_writes_nothing_into_its_plan() -> None:
    pipe = make()
    # Tables and meshes, which are made when they are asked for.
    made = {"training", "forward", "is_straight", "rank_meshes"}

    def written() -> dict[str, Any]:
        return {name: value for name, value in vars(pipe.plan).items() if name not in made}

    before = written()
    assert pipe.plan.facts.last is None
    pipe.value_and_grad(X, X)
    pipe.describe()
    assert written() == before
    assert pipe.plan.facts.last is not None
    assert pipe.plan.facts.straight is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        pipe.plan.remat = None
