"""Stages with side effects: once per microbatch, or refused."""

from __future__ import annotations

import jax
import pytest
from jax.experimental import io_callback

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.models import Block

X, T, M = models.rows(8), models.rows(8, seed=3), 4
CALLS: list[int] = []


@jax.custom_vjp
def counted(x):
    io_callback(lambda: CALLS.append(1), None, ordered=False)
    return x


counted.defvjp(lambda x: (counted(x), None), lambda _, ct: (ct,))


class Counted(Block):
    """Tells the host that it runs; no derivative of JAX's own would let it."""

    def __call__(self, x):
        return super().__call__(counted(x))


class Printing(Block):
    def __call__(self, x):
        jax.debug.callback(lambda: CALLS.append(1))
        return super().__call__(x)


def calls(kinds, *, S=2, **options) -> int:
    """Number of calls to the host in a training step."""
    stages = [kind for n, one in enumerate(kinds) for kind in models.build(one, 1, seed=n)]
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=S), loss_fn=models.squares, **options)
    CALLS.clear()
    pipe.value_and_grad(X, T)[0].block_until_ready()
    jax.effects_barrier()
    return len(CALLS)


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {"remat": None},
        {"remat": None, "schedule": "zb_h1"},
        {"remat": None, "S": 1},
    ],
)
def test_once_for_each_stage_and_microbatch(options):
    assert calls([Counted, Counted], **options) == 2 * M


REPEATED = "it would happen more often than once per microbatch; use "
MAY = ", or jax.debug.callback for what may be repeated"
AGAIN = (
    f'a stage has a side effect (io_callback), and with remat="stage" a backward runs its forward '
    f"again: {REPEATED}remat=None{MAY}"
)


@pytest.mark.parametrize(
    "kinds", [[Counted, Counted], [Block, Counted]], ids=["alike", "not alike"]
)
def test_what_would_happen_twice(kinds):
    with pytest.raises(ValueError) as caught:
        calls(kinds)
    assert str(caught.value) == AGAIN


def test_an_inference_calls_once_for_each_stage_and_microbatch():
    stages, mesh = models.build(Counted, 2), make_mesh(stage=2)
    CALLS.clear()
    Pipeline(stages, M, mesh=mesh)(X).block_until_ready()
    jax.effects_barrier()
    assert len(CALLS) == 2 * M


def test_prints_may_be_repeated():
    assert calls([Printing, Printing]) >= 2 * M
