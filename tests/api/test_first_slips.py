"""Slips of a first hour: the message names the argument and the line to write (issue 67)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline, generate, split
from pipeline.training.step import Step
from tests.support import models
from tests.support.models import Block

EXTRA = np.ones((8, 1), np.float32)
X, T = models.rows(8), models.rows(8, seed=3)


def make(**options):
    given = {"stages": models.build(Block, 2), "loss_fn": models.squares} | options
    return Pipeline(num_microbatches=2, **given)


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List(models.build(Block, 2))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Masked(Block):
    def __call__(self, x, mask):
        return super().__call__(x) * mask


class Unmasked(Block):
    def __call__(self, x, *, scale=1.0):
        return super().__call__(x) * scale


class NotCalled(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def forward(self, x):
        return self.linear(x)


SLIPS = {
    "all parts as stages": (
        lambda: Pipeline(split(Model(), 2, X), 2),
        (
            "stages is a Parts of all parts, such as pipeline.split returns: give each by its "
            "name, Pipeline(**parts, num_microbatches=M)"
        ),
    ),
    "a dict of parts as stages": (
        lambda: Pipeline({"stages": [], "head": None}, 2),
        (
            "stages is a dict of all parts, such as pipeline.split returns: give each by its name, "
            "Pipeline(**parts, num_microbatches=M)"
        ),
    ),
    "a class as head": (
        lambda: make(head=nnx.Linear),
        "head is the class Linear: give an instance of it, Linear(...)",
    ),
    "a class as loss": (
        lambda: make(loss_fn=CrossEntropy),
        "loss_fn is the class CrossEntropy: give an instance of it, CrossEntropy(...)",
    ),
    "classes as stages": (
        lambda: make(stages=[Block, Block]),
        "stages[0] is the class Block: give an instance of it, Block(...)",
    ),
    "a class as stages": (
        lambda: make(stages=Block),
        (
            "stages is the class Block: give an instance of it, Block(...), and give a list of K "
            "such modules"
        ),
    ),
    "inputs alone to describe": (
        lambda: make().describe(X),
        (
            "describe(inputs) describes a training step, whose loss_fn takes targets: give "
            "describe(inputs, targets), with () for none, or describe() for what needs no batch"
        ),
    ),
    "an extra of another name": (
        lambda: make(stages=models.build(Masked, 2)).loss(X, T, extras={"maks": EXTRA}),
        "extras= has 'maks', and stages[0] takes 'mask': rename it, or let every stage take it",
    ),
    "an extra that the second stage does not take": (
        lambda: make(stages=[*models.build(Masked, 1), *models.build(Unmasked, 1)])(
            X, extras={"mask": EXTRA}
        ),
        "extras= has 'mask', and stages[1] takes 'scale': rename it, or let every stage take it",
    ),
    "an extra as an option of loss": (
        lambda: make().loss(X, T, mask=EXTRA),
        (
            "Pipeline.loss() has no option 'mask': arrays for the stages go into extras={'mask': "
            "array}; there are extras, has_aux, inputs, num_microbatches, targets, weighed"
        ),
    ),
    "an extra as an option of a call": (
        lambda: make()(X, mask=EXTRA),
        (
            "Pipeline.__call__() has no option 'mask': arrays for the stages go into "
            "extras={'mask': array}; there are extras, inputs, num_microbatches"
        ),
    ),
    "extras misnamed": (
        lambda: make().value_and_grad(X, T, extra={"mask": EXTRA}),
        "Pipeline.value_and_grad() has no option 'extra'; did you mean 'extras'?",
    ),
    "no extras": (
        lambda: make(stages=models.build(Masked, 2)).value_and_grad(X, T),
        (
            "stages[0] takes 'mask' after its input, and there are no extras=: give extras="
            "{'mask': array} with leaves [N, ...], or give the argument a default"
        ),
    ),
    "a stage without a call": (
        lambda: make(stages=[*models.build(Block, 1), NotCalled(nnx.Rngs(0))])(X),
        (
            "stages[1] is a NotCalled, which has no __call__: define __call__(self, x) that "
            "returns the input of the next stage"
        ),
    ),
    "tokens of more than 32 bits": (
        lambda: make().loss(np.full((8, 8), 2**40), T),
        (
            "inputs has the integer 1099511627776, which JAX would wrap to int32: give tokens of "
            "the vocabulary, or other numbers of int32, or set jax_enable_x64"
        ),
    ),
    "extras of more than 32 bits": (
        lambda: make(stages=models.build(Masked, 2)).loss(
            X, T, extras={"mask": np.full((8, 1), -(2**33))}
        ),
        (
            "extras['mask'] has the integer -8589934592, which JAX would wrap to int32: give "
            "tokens of the vocabulary, or other numbers of int32, or set jax_enable_x64"
        ),
    ),
    "prompts of more than 32 bits": (
        lambda: generate(make(), np.full((8, 4), 2**40), 2),
        (
            "prompts has the integer 1099511627776, which JAX would wrap to int32: give tokens of "
            "the vocabulary, or other numbers of int32, or set jax_enable_x64"
        ),
    ),
    "an optax transformation as optimizer": (
        lambda: Step(make(), optax.sgd(0.1)),
        (
            "optimizer is an optax transformation; give make_optimizer(pipe, tx), or, if the model "
            "is no Pipeline, nnx.Optimizer(model, tx, wrt=nnx.Param)"
        ),
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_the_message_has_the_line_to_write(name):
    call, message = SLIPS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value) == message


def test_an_error_within_a_stage_is_left_as_it_is():
    class Wrong(Block):
        def __call__(self, x, mask=None):
            return self.helper(x, mask=mask)

        def helper(self, x):
            return x

    with pytest.raises(TypeError, match=r"helper\(\) got an unexpected keyword argument 'mask'"):
        make(stages=models.build(Wrong, 2)).loss(X, T, extras={"mask": EXTRA})

    class Inner(Block):
        def __call__(self, x, mask=None, **more):
            return Masked.__call__(self, x)

    with pytest.raises(TypeError, match=r"Masked.__call__\(\) missing 1 required positional"):
        make(stages=models.build(Inner, 2)).loss(X, T, extras={"other": EXTRA})


@pytest.mark.parametrize("data_parallel", ["fsdp", "zero1"])
def test_weights_that_no_data_shards_divide_are_warned_of(data_parallel):
    mesh = make_mesh(stage=2)
    with pytest.warns(UserWarning, match="shards nothing") as caught:
        pipe = make(data_parallel=data_parallel, mesh=mesh)
    message = (
        f"data_parallel={data_parallel!r} shards nothing: the mesh has one data shard, data 1 x "
        f"stage 2 (Auto); give mesh=make_mesh(stage=2, data=D) with D of 2 or more, or "
        f"leave data_parallel out"
    )
    assert [str(one.message) for one in caught] == [message]
    assert pipe.check(X, T) == [message]


def test_described_inputs_need_no_targets_that_the_loss_ignores():
    pipe = make(loss_fn=lambda y, _: jnp.mean(y**2))
    assert "bytes per rank" in pipe.describe(X, ())


def test_a_function_between_blocks_has_its_own_name():
    """Issue 71: `custom_jvp_call` was said where the user had written `relu`."""

    class Between(Model):
        def __call__(self, x):
            for layer in self.layers:
                x = jax.nn.relu(layer(x))
            return x

    assert "equations: relu runs between calls of blocks" in str(split(Between(), 2, X))
