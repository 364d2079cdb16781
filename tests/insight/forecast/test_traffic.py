"""Predicted messages of a step where no formula gives them, and repetitions on each rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import TENSOR, make_mesh, vary
from pipeline import Pipeline
from pipeline.core.autodiff.jaxpr.scopes import of_stages
from pipeline.insight.forecast import traffic
from pipeline.insight.scopes import trips
from schedules import build, lower
from schedules.lowering.program import COMMON
from tests.support import models
from tests.support.hlo import Sent

M = 4


def predicted(pipe: Pipeline, x: jax.ShapeDtypeStruct) -> traffic.Traffic:
    return traffic.predict_traffic(pipe.plan, *pipe._operands(x, x, None))


def compiled(pipe: Pipeline, x: jax.ShapeDtypeStruct) -> Sent:
    return Sent(pipe.lower(x, x).compile().as_text(), pipe.plan.training, pipe.mesh)


def rows(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, models.WIDTH), jnp.float32)


# --- how often a rank runs what ---


@pytest.mark.parametrize(
    ("family", "V", "options"),
    [
        ("1f1b", 1, {}),
        ("zb_v", 2, {"keep": "residuals"}),
        ("interleaved_1f1b", 2, {"shared": ("embed", "head")}),
        ("1f1b", 1, {"pattern": "partner"}),
    ],
)
def test_every_action_is_counted_once(family, V, options):
    S = 4
    program = lower(build(family, num_ranks=S, num_microbatches=8, num_stages=S * V), **options)
    T, total = program.num_ticks, 0
    for index, slot in enumerate(program.slots):
        for op in slot.ops:
            scope = f"jit(train)/ticks0_{T}/while/body/slot{index}/{op.label}"
            whole = trips(program, scope)
            halves = [
                trips(program, f"ticks{a}_{b}/slot{index}/{op.label}/while")
                for a, b in ((0, T // 2), (T // 2, T))
            ]
            assert (whole == sum(halves)).all()
            own = [
                trips(program, f"ticks0_{T}/{of_stages([k])}/slot{index}/{op.label}")
                for k in range(S * V)
            ]
            assert (whole == sum(own)).all()
            total = total + whole
    assert total.tolist() == [len(order) for order in program.schedule.orders]
    for name in COMMON if "shared" in options else ():
        found = [trips(program, f"ticks0_{T}/slot{n}/{name}") for n in range(len(program.slots))]
        assert sum(found).tolist() == [8] * S


def test_other_loops_are_not_known():
    program = lower(build("1f1b", num_ranks=2, num_microbatches=4))
    for scope in ("", "while", "slot0/F0", "ticks0_4/F0", "ticks0_4/slot0", "ticks0_4/slot0/X0"):
        assert trips(program, scope) is None


# --- what is in the step ---


@pytest.mark.slow
def test_stages_that_are_not_alike():
    """Each group counts its own ranks' actions."""
    stages = [models.Block(nnx.Rngs(0)), models.Hostile(nnx.Rngs(1))]
    options = {"data_parallel": "fsdp", "gather": "action", "remat": None}
    pipe = Pipeline(
        stages,
        M,
        mesh=make_mesh(stage=2, data=4),
        schedule="1f1b",
        loss_fn=models.squares,
        **options,
    )
    found, x = predicted(pipe, rows(32)), rows(32)
    assert {k: v.tolist() for k, v in found.sent.items()} == {
        k: v.tolist() for k, v in compiled(pipe, x).bytes.items()
    }
    assert found.over("data").any()


class Searching(nnx.Module):
    """Does something together with others until it is done."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        def halve(size):
            return jax.lax.pmax(vary(size, TENSOR), TENSOR) / 2

        size = jax.lax.while_loop(lambda size: size > 1, halve, jax.lax.stop_gradient(x).max())
        return jnp.tanh(x @ self.w[...]) * size


def test_a_loop_of_which_nobody_knows_the_end():
    pipe = Pipeline(
        models.build(Searching, 2),
        M,
        mesh=make_mesh(stage=2, tensor=2),
        schedule="1f1b",
        loss_fn=models.squares,
        remat=None,
    )
    found = predicted(pipe, rows(8))
    assert found.is_least
    assert found.over(TENSOR).tolist() == [4.0 * M] * 2  # once in each F
    assert "bytes sent per step, predicted, at least; of the rank that sends most:" in (
        pipe.describe(rows(8), rows(8)).splitlines()
    )


def test_one_device_sends_nothing():
    pipe = Pipeline(
        models.build(models.Block, 2), M, mesh=make_mesh(stage=1), loss_fn=models.squares
    )
    assert pipe.describe(rows(8), rows(8)).splitlines()[-1] == "nothing is sent"


def test_an_activation_of_several_arrays():
    """A message is all of them, and each is an exchange of its own."""
    pipe = Pipeline(
        models.build(models.Tree, 2),
        M,
        mesh=make_mesh(stage=2),
        schedule="eager_1f1b",
        loss_fn=lambda y, t: models.squares(y["row"], t),
    )
    x = {"row": rows(8), "gate": rows(8), "kind": jax.ShapeDtypeStruct((8,), jnp.int32)}
    found = traffic.predict_traffic(pipe.plan, *pipe._operands(x, rows(8), None))
    b = 8 // M
    assert found.message == 2 * b * models.WIDTH * 4 + b * 4
    T = pipe.plan.training.num_ticks
    assert found.runs[("stage",), "collective-permute"].tolist() == [3 * T] * 2
    assert found.sent[("stage",), "collective-permute"].tolist() == [T * found.message] * 2
    assert found.read.tolist() == [M] * 2
