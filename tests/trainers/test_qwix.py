"""Quantised training by qwix on stages: equal to the plain model under qwix (issue 56).

An optional lane: without the package nothing runs. Both models see one microbatch at a time, since
ranges are those of the rows that a call sees.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, split, weights
from tests.support.close import assert_close
from tests.trainers import models
from tests.trainers.models import MARKS, cross_entropy, quietly

with quietly():
    qwix = pytest.importorskip("qwix", exc_type=ImportError)

pytestmark = MARKS

ROWS, WIDTH, HIDDEN, WORDS, M = 16, models.WIDTH, 24, 20, 4
INT8, E4M3, E5M2 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2
# By default the largest entry of a channel is half-way between two integers: the last bit of a
# division, which each compiled program rounds in its own way, decides between them.
OFF_TIES = {f"{part}_calibration_method": "absmax,1.01" for part in ("weight", "act", "bwd")}
RULES: dict[str, dict[str, Any]] = {
    "int8": {"weight_qtype": INT8, "act_qtype": INT8, **OFF_TIES},
    "int8 gradients": {"weight_qtype": INT8, "act_qtype": INT8, "bwd_qtype": INT8, **OFF_TIES},
    "fp8": {"weight_qtype": E4M3, "act_qtype": E4M3},
    "fp8 gradients": {"weight_qtype": E4M3, "act_qtype": E4M3, "bwd_qtype": E5M2},
    "fp8 tensors": {"weight_qtype": E4M3, "act_qtype": E4M3, "disable_channelwise_axes": True},
    "int8 static": {"weight_qtype": INT8, "act_qtype": INT8, "act_static_scale": True, **OFF_TIES},
    "fp8 static": {"weight_qtype": E4M3, "act_qtype": E4M3, "act_static_scale": True},
}
X, IDS = np.zeros((ROWS, WIDTH), np.float32), np.zeros(ROWS, np.int32)


class Block(nnx.Module):
    """No activation has the shape of a weight, by which qwix tells one from the other."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


Plain = functools.partial(models.Plain, Block, WORDS)


def provider(rule: str) -> Any:
    return qwix.QtProvider([qwix.QtRule(module_path=".*(up|down)", **RULES[rule])])


def batches() -> Any:
    for n in range(4):
        words = np.random.default_rng(n).integers(WORDS, size=ROWS, dtype=np.int32)
        yield words, words * 3 % WORDS


def losses_of_plain(model: nnx.Module) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, words, targets):
        grad = nnx.value_and_grad(lambda model, x, t: cross_entropy(model(x), t))
        found = [grad(model, *part) for part in zip(*map(parts, (words, targets)), strict=True)]
        loss, grads = jax.tree.map(lambda *x: sum(x) / M, *found)
        optimizer.update(model, grads)
        return loss

    parts = lambda x: jnp.split(x, M)  # noqa: E731
    return [float(step(model, optimizer, *batch)) for batch in batches()]


def losses_of(pipe: Pipeline) -> list[float]:
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))

    @nnx.jit
    def step(pipe, optimizer, words, targets):
        loss, grads = pipe.value_and_grad(words, targets)
        optimizer.update(pipe, grads)
        return loss

    return [float(step(pipe, optimizer, *batch)) for batch in batches()]


def alike(stages: list[nnx.Module], own: Any, x: Any) -> list[nnx.Module]:
    """Quantised stages of one class: qwix gives each a class of its own."""
    quantised = [qwix.quantize_model(stage, own, x) for stage in stages]
    return [nnx.merge(nnx.graphdef(quantised[0]), nnx.state(stage)) for stage in quantised]


def piped(stages: list[nnx.Module], ends: Any, rule: str, schedule: str = "1f1b") -> Pipeline:
    from qwix._src.utils.flax_util import QuantStat

    options: Any = {"state": QuantStat} if "static" in rule else {}
    options |= {"embed": ends.embed, "head": ends.head, "mesh": make_mesh(stage=len(stages))}
    return Pipeline(stages, M, loss_fn=cross_entropy, schedule=schedule, **options)


@pytest.mark.parametrize("rule", RULES)
def test_stages_train_as_the_plain_model(rule: str) -> None:
    """Stages by hand, stages of `split`, and a quantised model that is split."""
    wanted = losses_of_plain(qwix.quantize_model(Plain(), provider(rule), IDS))
    assert abs(wanted[-1] - losses_of_plain(Plain())[-1]) > 1e-5
    plain = Plain()
    pipe = piped(alike(list(plain.blocks), provider(rule), X), plain, rule, "zb_h1")
    assert_close(losses_of(pipe), wanted)
    parts = split(plain, 2, IDS)
    pipe = piped(alike(parts.stages, provider(rule), parts.embed(IDS)), parts, rule)
    assert_close(losses_of(pipe), wanted)
    trained = Plain()
    weights.to_plain(pipe, trained)
    np.testing.assert_array_equal(
        trained.head.kernel[...], pipe.head.of_model["head"]["kernel"][...]
    )
    if "static" not in rule:
        whole = split(qwix.quantize_model(Plain(), provider(rule), IDS), 2, IDS)
        assert_close(losses_of(piped(whole.stages, whole, rule)), wanted)


def test_ranges_that_are_kept_must_be_declared() -> None:
    plain = Plain()
    stages = alike(list(plain.blocks), provider("fp8 static"), X)
    pipe = piped(stages, plain, "fp8")
    with pytest.raises(ValueError) as error:
        losses_of(pipe)
    assert str(error.value) == (
        "a stage writes to its QuantStat down.dot_general0_lhs: a pipeline runs a stage many times "
        "per step and keeps no such state; declare it, as by Pipeline(..., state=QuantStat), or "
        "freeze it"
    )


def test_parts_of_a_quantised_model_are_refused() -> None:
    """They would train unquantised."""
    whole = qwix.quantize_model(Plain(), provider("fp8"), IDS)
    with pytest.raises(ValueError) as error:
        piped(list(whole.blocks), whole, "fp8")
    assert str(error.value) == (
        "stages[0] is a part of a model that qwix.quantize_model was given whole, and qwix acts "
        "where that model is called, so the stage would compute unquantised: quantise each stage, "
        "qwix.quantize_model(stage, provider, x), or split the quantised model with pipeline.split"
    )
    own = [qwix.quantize_model(block, provider("fp8"), X) for block in whole.blocks]
    wanted = losses_of_plain(qwix.quantize_model(Plain(), provider("fp8"), IDS))
    assert_close(losses_of(piped(own, whole, "fp8")), wanted)
