"""The last incomplete accumulation: an update of fewer calls, or a report (issue 71)."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, add_loss, make_optimizer
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block
from tests.support.refusals import refusal
from tests.training.plain import Chain, assert_layers, by_hand

pytestmark = pytest.mark.usefixtures("standard_promotion")
BATCHES = [(models.rows(8, seed=n), models.rows(8, seed=n + 50)) for n in range(5)]


class Adding(Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        return add_loss(super().__call__(x), 0.1 * jnp.mean(x**2))


def pair(y: jax.Array, t: jax.Array) -> Any:
    return jnp.sum((y - t) ** 2), jnp.float32(t.size)


def step_of(accumulate: int, *, kind: Any = Block, M: int = 2, **options: Any) -> Step:
    plain = {"loss_fn": models.squares, "mesh": make_mesh(stage=2)}
    pipe = Pipeline(models.build(kind, 2), M, **plain | options)
    return Step(pipe, make_optimizer(pipe, optax.adam(1e-2)), accumulate=accumulate, ema=0.5)


def weights(step: Step) -> Any:
    return nnx.as_pure((nnx.state(step.model, nnx.Param), step.ema))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Block, {}),
        pytest.param(Block, {"engine": "programs"}, marks=pytest.mark.slow),
        (Adding, {"loss_fn": pair}),  # all calls run as one step
    ],
)
def test_fewer_calls_are_an_update_of_their_rows(kind: Any, options: dict[str, Any]) -> None:
    step, whole = step_of(4, kind=kind, **options), step_of(1, kind=kind, M=4, **options)
    assert step.flush() is None
    for batch in BATCHES[:2]:
        assert step(*batch) is None
    found = step.flush()
    wanted = whole(*map(jnp.concatenate, zip(*BATCHES[:2], strict=True)))
    assert (step.pending, step.updates) == (0, 1)
    for a, b in ((found.loss, wanted.loss), (found.grad_norm, wanted.grad_norm)):
        assert_close(a, b)
    for a, b in zip(*map(jax.tree.leaves, map(weights, (step, whole))), strict=True):
        assert_close(a, b)


def test_fewer_calls_are_an_update_of_plain_optax() -> None:
    step = step_of(4, head=Block(nnx.Rngs(9)))
    for batch in BATCHES[:3]:
        step(*batch)
    step.flush()
    rows = tuple(map(jnp.concatenate, zip(*BATCHES[:3], strict=True)))
    make = lambda: Chain(models.build(Block, 2), Block(nnx.Rngs(9)), models.squares)  # noqa: E731
    _, wanted, _ = by_hand(make, [rows], optax.adam(1e-2))
    assert_layers(step.model, nnx.state(step.model, nnx.Param), wanted)
    assert (step.updates, step.pending) == (1, 0)


def test_calls_whose_loss_is_not_finite_leave_the_weights() -> None:
    step = step_of(3)
    before = jax.tree.map(np.asarray, weights(step))
    step(BATCHES[0][0] * jnp.inf, BATCHES[0][1])
    assert int(step.flush().skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, weights(step), before)


def test_a_trainer_ends_with_the_calls_that_are_left() -> None:
    trainer = Trainer(step_of(2), BATCHES, steps=3, flush=True)
    assert trainer.run()
    assert len(trainer.losses) == trainer.done == 3
    step = step_of(2)
    for batch in BATCHES:
        step(*batch)
    assert_close(trainer.losses[-1], step.flush().loss)
    assert refusal(Trainer(step_of(2), BATCHES, steps=3).run) == (
        "the data ended after 2 of 3 updates and 1 of 2 calls of the next, which have no effect "
        "without flush=True; give data that repeats, or fewer steps"
    )


def test_calls_that_are_dropped_are_reported(capsys: Any) -> None:
    step = step_of(3)
    for batch in BATCHES[:2]:
        step(*batch)
    gc.collect()
    capsys.readouterr()
    del step
    gc.collect()
    assert capsys.readouterr().err == (
        "Step(accumulate=) ends with 2 calls after its last update, which have no effect; "
        "step.flush() makes an update of them\n"
    )


def test_after_step_needs_the_last_call() -> None:
    class Count(nnx.Variable[Any]):
        pass

    class Counting(Block):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(rngs)
            self.count = Count(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.count[...] += 1
            return super().__call__(x)

    step = step_of(2, kind=Counting, state=Count, after_step=lambda stage: None)
    step(*BATCHES[0])
    assert refusal(step.flush) == (
        "flush() after 1 of 2 calls: the pipeline's after_step runs in the last call of an update; "
        "give accumulate= a divisor of the number of batches"
    )
