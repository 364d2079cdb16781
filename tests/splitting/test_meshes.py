"""Models with layers for an axis of the mesh, cut by `split` (issue 52, U-split-experts)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from collectives.tensor import column_input, is_manual, row_output
from pipeline import Pipeline, split
from pipeline.layers import MixtureOfExperts, SwiGLU
from pipeline.training.batches import Padded, masked
from tests.splitting.parity import check_parts, squares
from tests.support.close import assert_close

WIDTH = 8
X = jax.random.normal(jax.random.key(0), (16, 6, WIDTH))
EXPERTS = {"batch": P(("data", "expert"))}


class Mixture(nnx.Module):
    def __init__(self, rngs, **options):
        options = {"num_experts": 4, "top_k": 2, "balance_weight": 0.0, **options}
        self.moe = MixtureOfExperts(WIDTH, 16, rngs=rngs, **options)

    def __call__(self, x):
        return x + self.moe(x)


class Columns(nnx.Module):
    """A layer that knows the axis, and whose weights do not name it."""

    def __init__(self, rngs):
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH, 16)))
        self.down = nnx.Param(0.1 * jax.random.normal(rngs.params(), (16, WIDTH)))

    def __call__(self, x):
        if not is_manual("tensor"):
            return x + nnx.relu(x @ self.up[...]) @ self.down[...]
        return x + row_output(nnx.relu(column_input(x) @ self.up[...]) @ self.down[...])


def columns(path, variable):
    return (None, "tensor") if "up" in str(path) else ("tensor",) if "down" in str(path) else None


class Model(nnx.Module):
    """Blocks between a first and a last layer; with a skip its stages run as equations."""

    def __init__(self, block, *, skip=False, ends=False):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.around = SwiGLU(WIDTH, 16, rngs) if ends else None
        self.blocks = nnx.List([block(rngs) for _ in range(2)])
        self.skip = skip

    def __call__(self, x):
        x = self.first(x)
        if self.around is not None:
            x = x + self.around(x)
        one, two = self.blocks
        y = one(x)
        x = two(y + x if self.skip else y)
        if self.around is not None:
            x = x + self.around(x)
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_of_a_model_run_on_their_ranks(skip):
    model = Model(Mixture, skip=skip)
    parts = split(model, 2, X)
    assert bool(parts.why) is skip
    pipe = {"mesh": make_mesh(stage=2, expert=2), **EXPERTS}
    check_parts(model, parts, squares, X[..., :3], X, pipe=pipe, tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_layers_for_tensor_are_cut_with_the_model(skip):
    """The parts of a rank vary over the axis, in embed and head and in every block."""
    model = Model(lambda rngs: Mixture(rngs, shared_hidden=8), skip=skip, ends=True)
    pipe = {"mesh": make_mesh(stage=2, expert=2, tensor=2), **EXPERTS}
    parts = split(model, 2, X)
    check_parts(model, parts, squares, X[..., :3], X, pipe=pipe, tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_a_rule_may_name_the_axes_of_a_models_weights(skip):
    model = Model(Columns, skip=skip)
    pipe = {"mesh": make_mesh(stage=2, tensor=2), "sharding": columns}
    parts = split(model, 2, X)
    check_parts(model, parts, squares, X[..., :3], X, pipe=pipe, tolerance=5e-5)


@pytest.mark.slow
def test_padding_does_not_leave_the_call_that_it_belongs_to():
    """Equations of one call have its mask, which a cached trace would give to the next."""
    model = Model(lambda rngs: Mixture(rngs, balance="microbatch", balance_weight=0.1), skip=True)
    mesh = make_mesh(stage=2, expert=2)
    options = {"num_microbatches": 2, "loss_fn": masked(squares), **EXPERTS}
    pipe = Pipeline(**split(model, 2, X), mesh=mesh, **options)
    counts = jnp.array([1.0] * 12 + [0.0] * 4)
    one = Pipeline(**split(model, 2, X), mesh=make_mesh(stage=1), **{**options, "batch": None})
    targets = Padded(X[..., :3], counts)
    loss, wanted = (p.value_and_grad(X, targets)[0] for p in (pipe, one))
    assert_close(loss, wanted, tolerance=5e-5)
