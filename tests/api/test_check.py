"""`pipe.check`: what is suspicious about a model, as a list, without a step."""

from __future__ import annotations

import gc
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.models import WIDTH, Block

ROWS, M, T = 8, 2, 6
GAIN = nnx.Param(jnp.ones(()))


class Amplified(Block):
    """A block that multiplies by a parameter of the module's globals, and leaves out its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * GAIN[...]


class Mixing(nnx.Module):
    """Positions take the mean of all positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(rngs.params.normal((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + x.mean(1, keepdims=True) * self.scale[...][None, None]


def quiet(kind: type, **options) -> Pipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stages = [kind(nnx.Rngs(k)) for k in range(2)]
        options = {"mesh": make_mesh(stage=2), "loss_fn": models.squares} | options
        return Pipeline(stages, M, **options)


def batch(*more: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (jax.ShapeDtypeStruct((ROWS, *more, WIDTH), jnp.float32),) * 2


class Nested(Block):
    """A block that calls its own parts ``stages``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.stages = nnx.List([])


@pytest.mark.parametrize("kind", [Block, Mixing, Nested])
def test_a_model_without_faults_has_an_empty_list(kind):
    assert quiet(kind).check(*batch(T)) == []


def test_parameters_that_nobody_trains_are_listed_before_and_after_a_step():
    pipe = quiet(Amplified)
    first = pipe.check(*batch())
    outside, unread = first
    assert "GAIN" in outside
    assert "stages[0].bias (so in 2 stages)" in unread
    with pytest.warns(UserWarning, match="are read by no part of the model"):
        pipe.value_and_grad(models.rows(ROWS), models.rows(ROWS))
    assert pipe.check(*batch()) == first


def test_positions_that_are_split_axes_without_work_and_short_memory_are_listed():
    mesh = make_mesh(stage=2, context=2, other=2)
    pipe = quiet(Mixing, mesh=mesh, batch=P("data", "context"), memory_limit=1)
    found = pipe.check(*batch(T))
    for text, start in zip(
        found,
        (
            "stages[0] mixes positions (place 0 of 6 in its result differs by ",
            "the mesh axis 'other' of size 2 is in no role: batch= splits nothing over it",
            "a step is predicted to take ",
        ),
        strict=True,
    ):
        assert text.startswith(start), found


def test_a_check_makes_no_array_and_leaves_the_first_step_its_warnings():
    pipe = quiet(Amplified)
    gc.collect()  # arrays of other tests, which a collection within the check would take
    before = sum(x.nbytes for x in jax.live_arrays())
    pipe.check(*batch())
    assert sum(x.nbytes for x in jax.live_arrays()) == before
    assert not pipe.plan.compiled.functions
    with pytest.warns(UserWarning, match="are read by no part of the model"):
        pipe.lower(*batch())


def test_warnings_of_others_are_passed_on_and_not_listed():
    class Loud(Block):
        def __call__(self, x: jax.Array) -> jax.Array:
            warnings.warn("a stage says so", stacklevel=1)
            return super().__call__(x)

    with pytest.warns(UserWarning, match="^a stage says so"):
        assert quiet(Loud).check(*batch()) == []


def test_a_check_does_not_use_up_what_a_step_warns_of():
    pipe = quiet(Block)
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.Mesh(pipe.mesh.devices, pipe.mesh.axis_names, axis_types=types)
    with jax.set_mesh(mesh):
        first = pipe.check(*batch())
        assert first[0].startswith("jax.set_mesh has a mesh of ")
        assert pipe.check(*batch()) == first


def test_a_batch_that_does_not_fit_is_refused_as_in_a_step():
    with pytest.raises(ValueError, match=r"^the batch has 3 rows, which num_micro"):
        quiet(Block).check(*(jax.ShapeDtypeStruct((3, WIDTH), jnp.float32),) * 2)
