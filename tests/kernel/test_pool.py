"""Pools of a step's memory: how what lies in their places is laid out."""

import jax
import jax.numpy as jnp
import pytest

from pipeline.kernel import memory


@pytest.mark.parametrize("platform", ["tpu", "cpu", "gpu"])
def test_tpus_are_told_how_places_lie(monkeypatch, platform):
    """Whenever they are written and read: short dims first; vectors and keys are as they are."""
    monkeypatch.setattr(memory, "platform", lambda: platform)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    values = [jnp.zeros((16, 8)), jnp.zeros((16, 2, 8)), jnp.zeros((1, 16, 1)), jnp.zeros(4), keys]

    def written_and_read(values):
        pool = memory.Pool([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values], 3, (), "x")
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
    monkeypatch.setattr(memory, "platform", lambda: platform)
    types = [jax.ShapeDtypeStruct((4, 8), jnp.float32)]

    def made(*, cleared):
        def run():
            return memory.Pool(types, 3, (), "stashes", cleared=cleared).all()

        text = jax.jit(run).trace().lower(lowering_platforms=("tpu",)).as_text()
        return "AllocateBuffer" not in text

    assert made(cleared=True)
    assert made(cleared=False) is (platform != "tpu")
