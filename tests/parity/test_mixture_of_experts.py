"""A mixture of experts in a stage, with the loss that keeps its experts in balance.

The layer is of flax's own and knows nothing of pipelines: it sows what balances it, as flax has it,
and whoever calls it adds that to the loss.

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, add_loss
from tests.support import models
from tests.support.close import assert_close
from tests.support.grids import effort
from tests.support.models import WIDTH
from tests.support.poison import poison  # noqa: F401, a fixture

ROWS, EXPERTS = 24, 2
X, T = models.rows(ROWS), models.rows(ROWS, seed=3)


class Experts(nnx.Module):
    """The best of some MLPs for each row, and a balance as of the Switch Transformer."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(EXPERTS)])

    def __call__(self, x):
        scores = nnx.softmax(self.router(x))
        best = nnx.one_hot(scores.argmax(axis=-1), EXPERTS)
        balance = EXPERTS * jnp.sum(best.mean(axis=0) * scores.mean(axis=0))
        self.sow(nnx.Intermediate, "balance", balance)
        found = jnp.stack([nnx.gelu(expert(x)) for expert in self.experts], axis=1)
        return jnp.sum(found * (best * scores)[..., None], axis=1)


class Layer(nnx.Module):
    """A stage: adds what its experts sow, or returns it."""

    def __init__(self, rngs: nnx.Rngs, *, explicit: bool = False):
        self.norm, self.experts = nnx.LayerNorm(WIDTH, rngs=rngs), Experts(rngs)
        self.explicit = explicit

    def __call__(self, x):
        y, sown = nnx.capture(self.experts, nnx.Intermediate)(self.norm(x))
        (balance,) = jax.tree.leaves(sown)
        return (x + y, balance) if self.explicit else add_loss(x + y, 0.1 * balance)


def wanted(K: int, M: int):
    """The mean loss of M microbatches with their balance, and gradients of K layers."""
    model = nnx.List(models.build(Layer, K, explicit=True))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        total = jnp.zeros(())
        layers = nnx.merge(graphdef, params, rest)
        for x, t in zip(jnp.split(X, M), jnp.split(T, M), strict=True):
            y = x
            for layer in layers:
                y, balance = layer(y)
                total += 0.1 * balance
            total += models.squares(y, t)
        return total / M

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, [grads[k] for k in range(K)]


CASES = [
    (2, 2, 2, 1, {}),
    (2, 1, 3, 1, {"remat": None}),
    (4, 4, 2, 1, {"schedule": "zb_h1", "remat": None}),
    (4, 2, 2, 2, {"schedule": "interleaved_1f1b"}),
    (2, 2, 6, 1, {"remat": jax.checkpoint_policies.dots_saveable, "schedule": "gpipe"}),
    (4, 4, 6, 2, {"schedule": "zb_h1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case[:4])), marks=effort(n, {0}, {1, 2}))
        for n, case in enumerate(CASES)
    ],
)
def test_experts_are_balanced_as_without_a_pipeline(request, case):
    K, S, M, D, options = case
    if S > 1:
        request.getfixturevalue("poison")
    stages, mesh = models.build(Layer, K), make_mesh(stage=S, data=D)
    pipe = Pipeline(stages, M, mesh=mesh, loss_fn=models.squares, **options)
    loss, grads = pipe.value_and_grad(X, T)
    want, want_grads = wanted(K, M * D)
    assert_close([loss, pipe.loss(X, T)], want)
    assert models.distance(models.by_stage(pipe, grads), want_grads) < 1e-5
