"""NaN wherever the kernel should not look."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from collectives import STAGE
from pipeline.core.step.run import ticks
from pipeline.core.step.stores import device


@pytest.fixture
def poison(monkeypatch):
    """NaN in all memory that the kernel has not written, and in every message nobody sent."""

    def spoilt(x):
        return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    zeros, make_tick, exchange = device.zeros, ticks._make_tick, ticks.exchange
    sends: list[bool] = []  # whether a run has several ranks
    counted = {"memory": 0, "messages": 0, "edges": 0}

    def nan_memory(leaf, *, lead=()):
        counted["memory"] += 1
        return spoilt(zeros(leaf, lead=lead))

    def nan_tick(actions):
        run = actions.run_slot
        sends.append(jax.lax.axis_size(STAGE) > 1)

        def spoiling(slot, row, message):
            counted["messages"] += 1
            return run(slot, row, jax.tree.map(spoilt, message))

        actions.run_slot = spoiling
        return make_tick(actions)

    def nan_exchange(tree, edges, axis):
        counted["edges"] += 1
        to = jnp.array([destination for _, destination in edges])
        arrives = (jax.lax.axis_index(axis) == to).any()
        return jax.tree.map(lambda x: jnp.where(arrives, x, spoilt(x)), exchange(tree, edges, axis))

    monkeypatch.setattr(device, "zeros", nan_memory)
    monkeypatch.setattr(ticks, "_make_tick", nan_tick)
    monkeypatch.setattr(ticks, "exchange", nan_exchange)
    yield
    if not any(sends):  # a rank by itself sends nothing
        del counted["edges"]
    assert all(counted.values()), counted
