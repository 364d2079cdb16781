"""The layer view of stages that are not alike: declared state, gradients beside it, no value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from tests.support.close import assert_close

K, M = 4, 2
X = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


class Count(nnx.Variable):
    """Number of calls of a stage."""


class Adapter(nnx.Param):
    """Parameters that are trained where the rest is frozen."""


class Stage(nnx.Module):
    """A layer more where k is odd, state of another shape in the last, values that are None."""

    def __init__(self, k, *, unlike=True):
        rngs = nnx.Rngs(k)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(1 + k % 2 * unlike)])
        self.bias = nnx.Param(None)
        self.kept = nnx.BatchStat(None)
        self.scale = Adapter(jnp.ones(4))
        self.mean = nnx.BatchStat(jnp.zeros((2, 4) if unlike and k == 3 else 4))
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        self.mean[...] = jnp.broadcast_to(x.mean(0), self.mean.shape)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x * self.scale[...][None]


class Head(nnx.Module):
    def __init__(self):
        self.last = nnx.Linear(4, 4, rngs=nnx.Rngs(9))
        self.bias, self.kept = nnx.Param(None), nnx.BatchStat(None)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.last(x)


def loss_fn(y, t):
    return ((y - t) ** 2).mean()


def pipeline(ranks, *, unlike=True, **options):
    return Pipeline(
        [Stage(k, unlike=unlike) for k in range(K)],
        M,
        mesh=make_mesh(stage=ranks),
        head=Head(),
        loss_fn=loss_fn,
        **({"state": nnx.Any(Count, nnx.BatchStat)} | options),
    )


@pytest.mark.few
@pytest.mark.parametrize(("ranks", "unlike"), [(4, True), (2, True), (4, False)])
def test_declared_state_in_layers_and_back(ranks, unlike):
    """Issue 38: to_layers of declared state of unlike stages was an AttributeError."""
    pipe = pipeline(ranks, unlike=unlike)
    pipe.value_and_grad(*X)
    tree = nnx.state(pipe, nnx.Any(Count, nnx.BatchStat))
    layers = pipe.to_layers(tree)
    for layer, stage in zip(layers["stages"], pipe.stages(), strict=True):
        assert sorted(layer) == ["calls", "mean"]
        assert int(layer["calls"][...]) == M
        assert_close(layer["mean"][...], stage.mean[...], tolerance=1e-6)
    assert int(layers["head"]["calls"]) == M
    layers["stages"][1]["calls"] = jnp.asarray(7, jnp.int32)
    nnx.update(pipe, pipe.from_layers(layers))
    assert [int(stage.calls[...]) for stage in pipe.stages()] == [M, 7, M, M]


@pytest.mark.few
@pytest.mark.parametrize("ranks", [4, 2])
def test_gradients_beside_declared_state(ranks):
    """Issue 38: to_layers of the gradients of wrt= was an AttributeError beside state."""
    pipe = pipeline(ranks, wrt=Adapter)
    _, grads = pipe.value_and_grad(*X)
    layers = pipe.to_layers(grads)
    assert [sorted(layer) for layer in layers["stages"]] == [["scale"]] * K

    def plain(scales):
        x = X[0]
        for k, scale in enumerate(scales):
            stage = Stage(k)
            stage.scale[...] = scale
            x = stage(x)
        return loss_fn(Head()(x), X[1])

    wanted = jax.grad(plain)([jnp.ones(4)] * K)
    for found, want in zip(layers["stages"], wanted, strict=True):
        assert_close(found["scale"][...], want, tolerance=1e-5)
    back = pipe.from_layers(layers)
    assert jax.tree.structure(jax.tree.map(jnp.shape, nnx.as_pure(back))) == jax.tree.structure(
        jax.tree.map(jnp.shape, nnx.as_pure(grads))
    )


@pytest.mark.slow
@pytest.mark.parametrize("unlike", [True, False])
def test_variables_that_hold_nothing(unlike):
    """Issue 38: a Param(None), as a layer without bias has, in every view of a pipeline."""
    pipe = pipeline(2, unlike=unlike)
    wanted = [Stage(k, unlike=unlike) for k in range(K)]
    for stage, want in zip(pipe.stages(), wanted, strict=True):
        assert nnx.graphdef(stage) == nnx.graphdef(want)
        assert stage.bias.get_raw_value() is None
    optimizer = make_optimizer(pipe, optax.sgd(0.1))
    layers = pipe.to_layers(nnx.state(pipe, nnx.Param))
    loss, grads = pipe.value_and_grad(*X)
    optimizer.update(pipe, grads)
    assert float(pipe.loss(*X)) < float(loss)
    nnx.update(pipe, pipe.from_layers(layers))
    assert_close(pipe.loss(*X), loss, tolerance=1e-6)
    other = pipe.replace(mesh=make_mesh(stage=4))
    assert_close(other.loss(*X), loss, tolerance=1e-5)


def test_a_variable_that_holds_a_tree_is_refused_by_name():
    """Issue 38: the layer view has an array for each variable, and says so."""

    class Tree(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"a": jnp.ones((4, 4)), "b": jnp.ones(4)})

        def __call__(self, x):
            return x @ self.pair["a"] + self.pair["b"][None]

    pipe = Pipeline([Tree(), Tree()], M, mesh=make_mesh(stage=2), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"^pair is a Param float32.* one array for each variable"):
        pipe.to_layers(nnx.state(pipe, nnx.Param))
