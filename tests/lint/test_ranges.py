"""Quantised parts whose ranges data shards take from their own rows (issue 67)."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models

X, T = models.rows(16), models.rows(16, seed=3)


def rounded(x, axis):
    scale = jnp.abs(x).max(axis, keepdims=True) / 127
    return jnp.round(x / scale) * scale


@jax.custom_vjp
def gradient_rounded(x):
    return x


gradient_rounded.defvjp(
    lambda x: (x, None), lambda _, ct: (rounded(ct.astype(jnp.float32), 0).astype(ct.dtype),)
)


class Quantised(nnx.Module):
    """A layer in int8, as qwix or AQT compute it."""

    def __init__(self, how, k=0):
        self.how, self.linear = how, nnx.Linear(8, 8, rngs=nnx.Rngs(k))

    def __call__(self, x):
        x = rounded(x, {"tensor": None, "row": -1}.get(self.how, -1))
        y = self.linear(x)
        return gradient_rounded(y) if self.how == "gradient" else y


def make(how, data, where="stages"):
    plain = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(2)]
    stages = [Quantised(how, k) for k in range(2)] if where == "stages" else plain
    head = Quantised(how) if where == "head" else None
    mesh = make_mesh(stage=2, data=data)
    return Pipeline(stages, 2, head=head, loss_fn=models.squares, mesh=mesh)


@pytest.mark.parametrize(
    ("how", "where", "part"),
    [
        ("tensor", "stages", "stages[0]"),
        ("gradient", "stages", "stages[0]"),
        ("tensor", "head", "head"),
    ],
)
def test_ranges_over_rows_are_warned_of_on_several_shards(how, where, part):
    message = (
        f"{part} quantises by ranges over rows (its call or its gradient takes a maximum over "
        f"them), and each of 2 data shards takes the range of its own rows, so loss and gradients "
        f"differ from those of one data shard by the error of quantisation: use ranges for each "
        f"row (in qwix leave disable_channelwise_axes and bwd_qtype out), or a mesh with data 1"
    )
    pipe = make(how, 2, where)
    with pytest.warns(UserWarning, match="ranges over rows") as caught:
        pipe.value_and_grad(X, T)
    assert [str(one.message) for one in caught] == [message]
    assert pipe.check(X, T) == [message]


@pytest.mark.parametrize(("how", "data"), [("row", 2), ("tensor", 1)])
def test_ranges_of_rows_and_of_one_shard_are_not(how, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = make(how, data).value_and_grad(X, T)
    wanted = make(how, 1).value_and_grad(X, T)[1] if how == "row" else grads
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= 1e-5 * np.abs(other).max()
