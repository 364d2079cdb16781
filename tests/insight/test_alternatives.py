"""Options that are proposed where a step takes too much memory."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

import collectives
from pipeline import Pipeline
from pipeline.insight.forecast.limit import alternatives


class Bent(nnx.Module):
    """A stage that says its width by its weights alone."""

    def __init__(self, hidden: int):
        self.up, self.down = nnx.Param(jnp.ones((2, hidden))), nnx.Param(jnp.ones((hidden, 2)))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


@pytest.mark.parametrize(("hidden", "moves"), [((3, 3, 3, 3), True), ((3, 3, 5, 5), False)])
def test_stages_of_other_widths_are_not_moved_to_other_ranks(hidden, moves):
    """Issue 39: chunks of one static half and other shapes were taken for alike."""
    pipe = Pipeline(
        list(map(Bent, hidden)),
        4,
        schedule="interleaved_1f1b",
        loss_fn=lambda y, t: jnp.mean(y - t),
        mesh=collectives.make_mesh(stage=2),
    )
    x = jnp.ones((8, 2))
    model, weights, batch = pipe._operands(x, x, None)
    found = [text for text, *_ in alternatives(pipe.plan, model, weights, batch)]
    assert ('schedule="zb_v"' in found) == moves
    assert 'schedule="looped_bfs"' in found
