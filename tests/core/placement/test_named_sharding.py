"""flax shardings, `nnx.get_named_sharding`: a pipeline's state lies where they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from tests.support.close import assert_close

ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Stage(nnx.Module):
    def __init__(self, k, *, unlike=False):
        rngs = nnx.Rngs(k)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        if unlike and k == 3:
            self.last = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.last(x) if hasattr(self, "last") else x


def pipeline(ranks, *, unlike=False, **options):
    return Pipeline(
        [Stage(k, unlike=unlike) for k in range(4)],
        2,
        mesh=make_mesh(stage=ranks),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
        head=nnx.Linear(4, 4, rngs=nnx.Rngs(9)),
        state=nnx.BatchStat,
        **options,
    )


def elsewhere(module, mesh):
    """Leaves of a module's state that do not lie where flax's shardings say."""
    state = nnx.state(module)
    wanted = dict(nnx.to_flat_state(nnx.get_named_sharding(state, mesh)))
    return [
        path
        for path, variable in nnx.to_flat_state(state)
        if not variable.get_raw_value().sharding.is_equivalent_to(
            wanted[path].get_raw_value(), variable.get_raw_value().ndim
        )
    ]


def bytes_on_first(state):
    shards = (s for x in jax.tree.leaves(state) for s in x.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device.id == 0)


@pytest.mark.few
@pytest.mark.parametrize(("ranks", "unlike"), [(4, False), (2, False), (4, True), (2, True)])
def test_named_shardings_leave_every_array_on_its_rank(ranks, unlike):
    """Issue 38: variables named no axis, so flax's shardings put all stages on every rank."""
    pipe = pipeline(ranks, unlike=unlike)
    state = nnx.state(pipe, (nnx.Param, nnx.BatchStat))
    held, loss = bytes_on_first(state), pipe.loss(ROWS, ROWS)
    shardings = nnx.get_named_sharding(state, pipe.mesh)
    nnx.update(pipe, jax.jit(lambda s: s, out_shardings=shardings)(state))
    assert bytes_on_first(nnx.state(pipe, (nnx.Param, nnx.BatchStat))) == held
    assert_close(pipe.loss(ROWS, ROWS), loss, tolerance=1e-6)
    if not unlike:
        assert elsewhere(pipe, pipe.mesh) == []


@pytest.mark.few
@pytest.mark.parametrize(
    "tx", [optax.sgd(1e-3, 0.9), optax.adafactor(1e-3)], ids=["sgd", "factors"]
)
def test_named_shardings_of_an_optimizers_state(tx):
    """Issue 38: moments lie as weights do, and factors of moments by rank."""
    pipe = pipeline(4)
    optimizer = make_optimizer(pipe, tx)
    assert elsewhere(optimizer, pipe.mesh) == []
    _, grads = pipe.value_and_grad(ROWS, ROWS)
    optimizer.update(pipe, grads)
    assert elsewhere(optimizer, pipe.mesh) == []


@pytest.mark.slow
def test_an_optimizer_may_keep_state_of_other_shapes():
    """Issue 38: flax must not lay out by the axis of a weight state that is shaped otherwise."""
    pipe = pipeline(4)
    optimizer = nnx.Optimizer(pipe, optax.adafactor(1e-3), wrt=pipe.wrt)
    _, grads = pipe.value_and_grad(ROWS, ROWS)
    optimizer.update(pipe, grads)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(pipe, nnx.Param)))


def test_stages_have_the_metadata_that_they_had():
    """Issue 38: the axis of ranks is the pipeline's, and no word of the model."""
    given = Stage(0)
    for k, stage in enumerate(pipeline(4).stages()):
        assert nnx.graphdef(stage) == nnx.graphdef(Stage(k))
        for path, variable in nnx.to_flat_state(nnx.state(stage)):
            own = dict(nnx.to_flat_state(nnx.state(given)))[path]
            assert dict(variable.get_metadata()) == dict(own.get_metadata())
