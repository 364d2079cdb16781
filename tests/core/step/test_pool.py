"""Pools of a step's memory: how what lies in their places is laid out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.autodiff.jaxpr import refs
from pipeline.core.step.stores import device


@pytest.mark.parametrize("platform", ["tpu", "cpu", "gpu"])
def test_tpus_are_told_how_places_lie(monkeypatch, platform):
    """Whenever they are written and read: short dims first; vectors and keys are as they are."""
    monkeypatch.setattr(refs, "platform", lambda: platform)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    values = [jnp.zeros((16, 8)), jnp.zeros((16, 2, 8)), jnp.zeros((1, 16, 1)), jnp.zeros(4), keys]

    def written_and_read(values):
        pool = device.Pool([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values], 3, (), "x")
        pool[1] = values
        return pool[1]

    lowered = jax.jit(written_and_read).trace(values).lower(lowering_platforms=("tpu",))
    lines = [line for line in lowered.as_text().splitlines() if "LayoutConstraint" in line]
    # What is told is from the last dim of memory to the first.
    orders = ["[1, 0]", "[2, 0, 1]", "[1, 2, 0]"] if platform == "tpu" else []
    assert len(lines) == 2 * len(orders)
    assert all(sum(order in line for line in lines) == 2 for order in orders)


@pytest.mark.parametrize("platform", ["tpu", "cpu", "gpu"])
def test_only_a_tpu_leaves_out_clearing(monkeypatch, platform):
    """And only where all that is read was written."""
    monkeypatch.setattr(device, "platform", lambda: platform)
    types = [jax.ShapeDtypeStruct((4, 8), jnp.float32)]

    def made(*, cleared):
        def run():
            return device.Pool(types, 3, (), "stashes", cleared=cleared).all()

        text = jax.jit(run).trace().lower(lowering_platforms=("tpu",)).as_text()
        return "AllocateBuffer" not in text

    assert made(cleared=True)
    assert made(cleared=False) is (platform != "tpu")


def test_a_value_of_another_shape_is_refused():
    """JAX would write it into a part of the place."""
    pool = device.Pool([jax.ShapeDtypeStruct((4, 8), jnp.float32)], 3, (), "x")
    with pytest.raises(ValueError) as e:
        pool[1] = [jnp.ones((4, 6))]
    assert str(e.value) == "a value of shape (4, 6) goes into a place of shape (4, 8)"


def test_a_place_is_read_and_written_as_ref_and_index_would():
    values = [jnp.arange(6.0).reshape(2, 3), jnp.ones((), jnp.int32), jnp.arange(3) > 1]
    pool = device.Pool([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values], 3, (), "x")
    for place in (1, jnp.uint32(2)):
        pool[place] = values
        jax.tree.map(np.testing.assert_array_equal, pool[place], values)
        for ref, value in zip(pool.refs, values, strict=True):
            np.testing.assert_array_equal(ref[int(place)], value)
    jax.tree.map(np.testing.assert_array_equal, pool[0], [jnp.zeros_like(x) for x in values])
