"""Values that a stage puts into host memory: kept by no pool, and refused by name (issue 38)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close

OFFLOADS = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)
DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
REFUSED = (
    "a stage puts float32[2,6] into host memory (a jax.checkpoint policy that offloads, as remat= "
    "or within the stage, or jax.device_put), and a pipeline keeps stashes in the memory of its "
    "devices: take a policy that saves these values, such as "
    "jax.checkpoint_policies.save_only_these_names(...), or one that recomputes them"
)


class Stage(nnx.Module):
    """A layer with a name for its activation, perhaps under a policy of its own."""

    def __init__(self, k, *, policy=None):
        self.layer, self.policy = nnx.Linear(6, 6, rngs=nnx.Rngs(k)), policy

    def __call__(self, x):
        if self.policy is None:
            return self.run(x)
        return jax.checkpoint(self.run, policy=self.policy)(x)

    def run(self, x):
        return x + jnp.sin(checkpoint_name(jnp.tanh(self.layer(x)), "h"))


X, T = jax.random.normal(jax.random.key(0), (2, 8, 6))


def step(*, ranks, own=None, **options):
    stages = [Stage(k, policy=own) for k in range(2)]
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=ranks), loss_fn=models.squares, **options)
    return pipe.value_and_grad(X, T)


@pytest.mark.parametrize(
    "options", [{"remat": OFFLOADS}, {"remat": None, "own": OFFLOADS}, {"remat": DOTS}]
)
def test_a_policy_that_offloads_is_refused(options):
    with pytest.raises(ValueError, match="host memory") as caught:
        step(ranks=2, **options)
    assert str(caught.value) == REFUSED


@pytest.mark.few
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1, "remat": OFFLOADS},
        {"ranks": 2, "own": OFFLOADS, "schedule": "1f1b"},
        {"ranks": 2, "own": DOTS, "schedule": "zb_h1"},
    ],
)
def test_one_that_keeps_nothing_between_ticks_works(options):
    loss, grads = step(**options)
    wanted, plain = step(ranks=options["ranks"], schedule="gpipe")
    assert_close(loss, wanted)
    assert models.distance(grads, plain) < 1e-5
