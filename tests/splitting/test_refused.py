"""Refusals of `split`: the value or the model, the rule, and the remedy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pipeline import split
from tests.splitting import models

WIDTH = models.WIDTH


def x(rows=4):
    return jnp.ones((rows, WIDTH))


class Chain(nnx.Module):
    """Layers that something is done with."""

    def __init__(self, layers=4, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(Chain):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


class Sowing(Chain):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "outputs", y)
        return y


class Jitted(Chain):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class Writing(Chain):
    def __init__(self):
        super().__init__()
        self.count = jnp.zeros(())

    def __call__(self, x):
        self.count = self.count + 1
        return super().__call__(x)


class Streams(Chain):
    def __call__(self, x, rngs=None):
        return super().__call__(x)


class Scanned(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


def refusal(*args, **options) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        split(*args, **options)
    return str(error.value)


CASES = {
    "no model": (
        lambda: (lambda x: x, 2, x()),
        {},
        "model is of type function: must be an nnx.Module",
    ),
    "no stages": (
        lambda: (Chain(), 0, x()),
        {},
        "num_stages=0: must be a number of stages, 1 or more",
    ),
    "no arrays": (
        lambda: (Chain(), 2),
        {},
        (
            "the model is given no array: give split an example of what it is called with, "
            "such as split(model, 4, tokens)"
        ),
    ),
    "other rows": (
        lambda: (models.UNet(), 2, jnp.ones((4, 4, 4, 2)), jnp.ones(3)),
        {},
        (
            "time is float32[3], images float32[4,4,4,2]: all arrays have the batch as leading "
            "axis; repeat for each row what has none, or leave it to call="
        ),
    ),
    "random streams": (
        lambda: (Streams(), 2, x(), nnx.Rngs(0)),
        {},
        (
            "rngs is of type Rngs, a part of a model: what has state or random streams belongs "
            "to the model itself; make the model with it (rngs=), or leave it to call="
        ),
    ),
    "unknown extras": (
        lambda: (Chain(), 2, x()),
        {"extras": ("mask",)},
        "extras='mask': no array that the model is given has this name; they are x",
    ),
    "unknown blocks": (
        lambda: (Chain(), 2, x()),
        {"blocks": "blocks"},
        (
            "blocks='blocks': Chain has no list of two or more modules of that path, nor "
            "modules of that name and a number; it has 'layers'"
        ),
    ),
    "no blocks": (
        lambda: (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), 2, x()),
        {},
        (
            "Linear has no list of modules, nor modules that are numbered, between whose calls "
            "it could be cut; where one module holds all layers on a leading axis (nnx.vmap, "
            "nnx.scan), give that to Pipeline as stages"
        ),
    ),
    "stacked layers": (
        lambda: (Scanned(), 2, x()),
        {},
        (
            "Scanned has no list of modules, nor modules that are numbered, between whose "
            "calls it could be cut; where one module holds all layers on a leading axis "
            "(nnx.vmap, nnx.scan), give that to Pipeline as stages"
        ),
    ),
    "too few blocks": (
        lambda: (Chain(3), 4, x()),
        {},
        (
            "num_stages=4: Chain can be cut between calls of numbered modules, and on this "
            "example calls 3 of 'layers'; ask for fewer stages, or name blocks that lie "
            "deeper, by blocks="
        ),
    ),
    "too few of those named": (
        lambda: (Chain(3), 4, x()),
        {"blocks": "layers"},
        (
            "num_stages=4, and the model calls 3 blocks of 'layers': ask for fewer stages, or "
            "give a cut= in which some have none"
        ),
    ),
    "blocks that are not called": (
        lambda: (Chain(), 2, x()),
        {"blocks": "layers", "call": lambda model, x: x},
        (
            "blocks='layers': the model calls none of them on this example; name those that it "
            "calls, or give an example on which it does"
        ),
    ),
    "a cut that does not add up": (
        lambda: (Chain(), 2, x()),
        {"cut": [1, 2]},
        "cut=[1, 2]: must be 2 numbers, which add up to the 4 calls of 'layers'",
    ),
    "costs of other calls": (
        lambda: (Chain(), 2, x()),
        {"costs": [1.0]},
        "costs= has 1 numbers: must be 4, none below 0, one for each call of 'layers'",
    ),
    "cut and costs": (
        lambda: (Chain(), 2, x()),
        {"costs": [1.0] * 4, "cut": [2, 2]},
        "cut= and costs= are both given: costs are there to choose a cut",
    ),
    "blocks that two stages call": (
        lambda: (Twice(2), 2, x()),
        {},
        (
            "layers.0.bias is used in stages[0], stages[1] (in calls of layers.0): a parameter "
            "must be in one stage, or in embed and head; cut so that one stage has all its uses, "
            "by cut=, or give each use its own parameter"
        ),
    ),
    "state that is made": (
        lambda: (Sowing(), 2, x()),
        {},
        (
            "the model makes the Intermediate outputs when it is called, and a pipeline keeps "
            "no such state: return what is needed, or leave it out (sow: switch it off)"
        ),
    ),
    "an array that is written": (
        lambda: (Writing(), 2, x()),
        {},
        (
            "the model writes to its array count when it is called: make it an nnx.Variable, "
            "and declare it by Pipeline(state=...)"
        ),
    ),
}


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("name", CASES)
def test_refusal(name) -> None:
    arguments, options, message = CASES[name]
    assert refusal(*arguments(), **options) == message


def test_blocks_within_a_transformed_function_are_not_found() -> None:
    """nnx gives the function a copy of the model."""
    assert refusal(Jitted(), 2, x()) == (
        "num_stages=2: Jitted can be cut between calls of numbered modules, and on this example "
        "calls none; calls within functions that nnx transforms (nnx.jit, nnx.remat, nnx.scan) are "
        "not seen: switch these off, or give the layers to Pipeline as stages yourself"
    )


def test_blocks_within_a_loop() -> None:
    def call(model, x):
        return jax.lax.fori_loop(0, 2, lambda _, x: model(x), x)

    assert refusal(Chain(), 2, x(), call=call) == (
        "layers.0 is called within a loop, a branch, or a function that jax or nnx transform "
        "(scan, cond, jit, remat): a pipeline cuts between calls in plain Python; name blocks that "
        "are called there, by blocks=, or let call= do it"
    )


def test_one_stage_may_call_a_block_twice() -> None:
    parts = split(Twice(2), 2, x(), cut=[4, 0])
    assert [len(names) for names in parts.blocks] == [4, 0]


def test_other_arguments_than_those_of_the_example() -> None:
    parts = split(models.Vision(), 2, jnp.ones((2, 4, 4, 3)), deterministic=True)
    message = (
        "the model was split by an example of (an array, deterministic=True), and this is (an "
        "array, deterministic=False): only arrays may differ; split the model by such an example"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        parts.inputs(jnp.ones((2, 4, 4, 3)), deterministic=False)


def test_a_model_with_one_block_is_one_stage() -> None:
    class One(Chain):
        def __init__(self):
            super().__init__(2)

        def __call__(self, x):
            return self.layers[1](x)

    assert split(One(), 1, x()).blocks == (("layers.1",),)
    assert "calls 1 of 'layers'" in refusal(One(), 2, x())


def test_types_do() -> None:
    parts = split(nnx.eval_shape(Chain), 2, jax.ShapeDtypeStruct((4, WIDTH), jnp.float32))
    assert len(parts.stages) == 2
