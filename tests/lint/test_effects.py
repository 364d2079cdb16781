"""Stages with side effects: once per microbatch, or refused."""

from __future__ import annotations

import re

import jax
import pytest
from jax.experimental import io_callback

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
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


# --- the axis of the ranks (issue 67) ---


def over_stage(name):
    """Make a function that uses the axis ``stage``, by the name of a function of `jax.lax`."""
    function = getattr(jax.lax, name)
    match name:
        case "axis_index":
            return lambda x: x * function("stage").astype(x.dtype)
        case "axis_size":
            return lambda x: x / function("stage")
        case "all_gather":
            return lambda x: jax.lax.fori_loop(0, 1, lambda _, x: function(x, "stage")[0], x)
        case _:
            return jax.jit(lambda x: function(x, ("data", "stage")))


def with_part(part, name, **options):
    """Make a pipeline of plain blocks in which one part uses the axis ``stage``."""
    use = over_stage(name)

    class Using(Block):
        def __call__(self, x):
            return use(super().__call__(x))

    def kind(other):
        return Using if part == other else Block

    (embed,), (head,) = (models.build(kind(end), 1, seed=3) for end in ("embed", "head"))
    stages = [*models.build(Block, 1), *models.build(kind("stages"), 1, seed=1)]
    ends = {"embed": embed, "head": head} if part != "stages" else {}
    loss_fn = (lambda y, t: models.squares(use(y), t)) if part == "loss_fn" else models.squares
    mesh = make_mesh(stage=2, data=2)
    return Pipeline(stages, 2, mesh=mesh, loss_fn=loss_fn, **ends, **options)


@pytest.mark.parametrize(
    ("part", "name", "call", "label"),
    [
        ("stages", "axis_index", "value_and_grad", "stages[1]"),
        ("stages", "all_gather", "__call__", "stages[1]"),
        ("head", "pmax", "__call__", "embed or head"),
        ("embed", "psum", "__call__", "embed or head"),
        ("embed", "psum", "loss", "embed, head or loss_fn"),
        ("loss_fn", "all_gather", "value_and_grad", "embed, head or loss_fn"),
    ],
)
@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_a_part_that_meets_other_stages_is_refused(part, name, call, label, engine):
    pipe = with_part(part, name, engine=engine)
    with pytest.raises(ValueError, match="over the axis 'stage'") as caught:
        getattr(pipe, call)(X, *[T] * (call != "__call__"))
    assert str(caught.value) == (
        f"{label} calls jax.lax.{name} over the axis 'stage', whose ranks run other stages "
        f"meanwhile, and results may not depend on the rank of a stage: leave it out, give a stage "
        f"its number when you make it, or sum over an axis of the batch, such as 'data'"
    )


@jax.custom_vjp
def by_rank(x):
    return x


by_rank.defvjp(
    lambda x: (x, None),
    lambda _, ct: (ct * jax.lax.axis_index("stage").astype(ct.dtype),),
)


@pytest.mark.parametrize("engine", ["scan", "programs"])
@pytest.mark.parametrize(
    ("part", "label"), [("stages", "stages[1]"), ("loss_fn", "embed, head or loss_fn")]
)
def test_a_derivative_that_asks_for_its_rank_is_refused(part, label, engine):
    """Gradients would differ between the engines, and collectives would hang (issue 67)."""

    class Using(Block):
        def __call__(self, x):
            return by_rank(super().__call__(x))

    last = models.build(Using if part == "stages" else Block, 1, seed=1)
    loss_fn = models.squares if part == "stages" else lambda y, t: models.squares(by_rank(y), t)
    pipe = Pipeline(
        [*models.build(Block, 1), *last],
        2,
        mesh=make_mesh(stage=2),
        loss_fn=loss_fn,
        engine=engine,
    )
    message = rf"^the derivative of {re.escape(label)} calls jax.lax.axis_index over the axis"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(X, T)


@pytest.mark.parametrize("part", ["stages", "loss_fn"])
def test_both_engines_have_as_many_ranks(part):
    scan, programs = (
        with_part(part, "axis_size", engine=engine).loss(X, T) for engine in ("scan", "programs")
    )
    assert_close(programs, scan, tolerance=1e-6)
    assert scan != with_part("", "axis_size").loss(X, T)
